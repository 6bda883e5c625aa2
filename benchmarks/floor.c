/* The floor: what the same work costs with no store, no queue and no Python.
 *
 *     floor watch FILE            run each line appended to FILE as soon as inotify tells of it, until killed;
 *                                 a line reads "priority,program,,words"
 *     floor run N SLOTS PROGRAM WORD...
 *                                 run PROGRAM N times, SLOTS at once; WORD... N is what it gets;
 *                                 prints the seconds from the first start to the last end
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_WORDS 16

extern char **environ;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void spawn(char **words) {
    pid_t pid;
    errno = posix_spawn(&pid, words[0], NULL, NULL, words, environ);
    if (errno)
        fail(words[0]);
}

static void wait_for_one(void) {
    int status;
    if (wait(&status) < 0)
        fail("wait");
    if (status) {
        fprintf(stderr, "a job ended with status %d\n", status);
        exit(1);
    }
}

static void run_line(char *line) {
    char *words[MOST_WORDS + 1];
    int count = 0;
    char *program = strchr(line, ',');
    char *arguments = program ? strstr(program + 1, ",,") : NULL;
    if (!arguments)
        return;
    *arguments = 0;
    words[count++] = program + 1;
    for (char *word = strtok(arguments + 2, " \n"); word && count < MOST_WORDS; word = strtok(NULL, " \n"))
        words[count++] = word;
    words[count] = NULL;
    spawn(words);
    wait_for_one();
}

static int watch(const char *path) {
    static char text[1 << 16];
    char events[4096];
    int notify = inotify_init1(IN_CLOEXEC);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (notify < 0 || file < 0 || inotify_add_watch(notify, path, IN_MODIFY) < 0)
        fail(path);
    while (read(notify, events, sizeof events) > 0) {
        ssize_t length = read(file, text, sizeof text - 1);
        if (length < 0)
            fail(path);
        text[length] = 0;
        for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
            *end = 0;
            run_line(line);
        }
    }
    return 1;
}

static int run(int count, int slots, int given, char **program) {
    char *words[MOST_WORDS + 1], number[32];
    int running = 0;
    if (given > MOST_WORDS - 1)
        return 2;
    memcpy(words, program, given * sizeof *words);
    words[given] = number;
    words[given + 1] = NULL;
    double start = seconds();
    for (int i = 0; i < count; i++) {
        snprintf(number, sizeof number, "%d", i);
        if (running == slots) {
            wait_for_one();
            running--;
        }
        spawn(words);
        running++;
    }
    for (; running; running--)
        wait_for_one();
    printf("%.9f\n", seconds() - start);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "watch"))
        return watch(argv[2]);
    if (argc >= 5 && !strcmp(argv[1], "run"))
        return run(atoi(argv[2]), atoi(argv[3]), argc - 4, argv + 4);
    fprintf(stderr, "usage: floor watch FILE | floor run N SLOTS PROGRAM WORD...\n");
    return 2;
}
