/* A library for LD_PRELOAD: makes the disk slow, and records the waits for events.
 *
 * While the folder SLOW_SYNC exists, the main thread of each process that loads this library
 *   - sleeps SLOW_SYNC_US microseconds after each fsync and fdatasync;
 *   - appends a line to SLOW_SYNC/PID for each such call and for each begin and end of epoll_wait:
 *     the call's letter (s: synced, w: wait begins, e: wait ends) and the monotonic time in nanoseconds.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static int on(void) {
    const char *folder = getenv("SLOW_SYNC");
    return folder && gettid() == getpid() && access(folder, F_OK) == 0;
}

static void record(char what) {
    char path[PATH_MAX], line[64];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(path, sizeof path, "%s/%d", getenv("SLOW_SYNC"), getpid());
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOENT)
        return; /* the folder was renamed: the measurement has ended */
    int length = snprintf(line, sizeof line, "%c %lld\n", what, now.tv_sec * 1000000000LL + now.tv_nsec);
    if (fd < 0 || write(fd, line, length) != length)
        abort(); /* a record with missing lines would give wrong passes */
    close(fd);
}

static int slow(const char *name, int fd) {
    int (*sync)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int result = sync(fd), error = errno;
    if (on()) {
        usleep(atoi(getenv("SLOW_SYNC_US")));
        record('s');
    }
    errno = error;
    return result;
}

int fsync(int fd) { return slow("fsync", fd); }

int fdatasync(int fd) { return slow("fdatasync", fd); }

int epoll_wait(int epoll, struct epoll_event *events, int most, int timeout) {
    int (*wait)(int, struct epoll_event *, int, int) = dlsym(RTLD_NEXT, "epoll_wait");
    if (!on())
        return wait(epoll, events, most, timeout);
    record('w');
    int result = wait(epoll, events, most, timeout), error = errno;
    record('e');
    errno = error;
    return result;
}
