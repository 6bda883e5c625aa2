/* A fake of NVIDIA's libnvidia-ml.so.1: it reports the GPUs that a text file describes.
 *
 * The environment variable NVML_STUB_FILE names the file. The file is read again when its time, size or inode has
 * changed, so each call sees the latest edit. Each line is one statement, `#` begins a comment, and the order of the
 * `gpu` lines is the order of the indices. stub.py writes such files:
 *
 *   driver 550.54.15                       version of the driver
 *   cuda 12040                             newest CUDA version that the driver knows: 1000 * major + 10 * minor
 *   gpu UUID [KEY=VALUE ...]               name (underscores become spaces), total, used, reserved (MiB), load (percent),
 *                                          temp (Celsius), power (W), energy (J), mig (0 or 1), ecc (errors), bus (number)
 *                                          VALUE `-`: the function returns NVML_ERROR_NOT_SUPPORTED
 *   proc UUID pid=PID [mem=MIB] [type=C|G] [util=PERCENT]
 *                                          mem `-` or absent: memory unknown; util `-` or absent: no sample
 *   error FUNCTION [UUID] CODE             this function returns CODE (for this GPU); `*`: every function about a GPU
 *   hang FUNCTION [UUID]                   this function never returns
 *   xid UUID CODE [NUMBER]                 an XID event, reported once to each process that registered for events of the GPU
 *                                          before the line was there; NUMBER makes equal lines differ. UUID of a MIG
 *                                          instance: its GPU reports the event, and names the instance
 *   topology UUID UUID LEVEL               distance of two GPUs (10: one switch ... 50: different sockets)
 *   instance UUID UUID PROFILE [KEY=VALUE ...]  a MIG instance: of the first GPU, while its mig is 1; total and used
 *   nvlink UUID UUID                       an active NVLink between two GPUs
 *   nvswitch UUID                          an active NVLink from a GPU to a switch
 *
 * Without a file there is no driver. An invalid line is reported on stderr, and every function returns
 * NVML_ERROR_UNKNOWN until it is fixed. Built with -DOLD_DRIVER, it lacks the functions that drivers before 510 lack.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- The part of NVIDIA's nvml.h that is used here; the layouts are the ABI. ------------------------------------ */

typedef int nvmlReturn_t;
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

typedef struct handle *nvmlDevice_t;
typedef struct event_set *nvmlEventSet_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
#define MEMORY_V2_VERSION ((unsigned int)(sizeof(nvmlMemory_v2_t) | (2U << 24)))

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t; /* the same for _v2 and _v3 */

#ifndef OLD_DRIVER
typedef struct {
    unsigned int pid;
    unsigned long long timeStamp;
    unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;
#endif

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
} nvmlEventData_v1_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

#define NO_INSTANCE 0xFFFFFFFFU
#define EVENT_XID 8ULL
#define MOST_LINKS 18 /* NVLinks of a GPU */
#define PCI_OF_GPU 0x233010DEU
#define PCI_OF_SWITCH 0x22A310DEU
#define BUS_OF_SWITCH 0xC0U
#define BUS_OF_HIDDEN_GPU 0xB0U /* of a GPU that is not in the file, as in a container that shows some GPUs */

/* ---- Contents of the file. -------------------------------------------------------------------------------------- */

#define MOST_GPUS 64
#define MOST_LINES 4096 /* limit for processes, rules, XIDs and distances, of each kind */
#define MOST_HANDLES 512
#define MOST_EVENT_SETS 64
#define WORD 96
#define MOST_WORDS 32
#define ABSENT ULLONG_MAX /* `-`; also NVML's own value for unknown memory of a process */
#define MIB (1024ULL * 1024ULL)
#define LOOK_AGAIN_MS 5

enum key { TOTAL, USED, RESERVED, LOAD, TEMP, POWER, ENERGY, MIG, ECC, BUS, KEYS };
static const char *const key_names[KEYS] = {"total", "used",   "reserved", "load", "temp",
                                            "power", "energy", "mig",      "ecc",  "bus"};
static const unsigned long long key_defaults[KEYS] = {81559, 0, 534, 0, 40, 70, 0, 0, 0, 0};

struct gpu {
    char uuid[WORD], name[WORD];
    unsigned long long value[KEYS];
    unsigned int index;
    char parent[WORD]; /* of a MIG instance: UUID of its GPU; empty: a GPU */
};

struct process {
    char uuid[WORD];
    unsigned int pid;
    unsigned long long memory, load;
    char type;
};

struct rule { /* an `error` or a `hang`; empty UUID: all GPUs */
    char function[WORD], uuid[WORD];
    int code, hangs;
};

struct xid {
    char uuid[WORD];
    unsigned long long code, number;
};

struct nearness {
    char one[WORD], other[WORD];
    unsigned int level;
};

struct wire { /* an NVLink; `other` empty: to a switch */
    char one[WORD], other[WORD];
};

struct machine {
    int present, broken;
    char driver[WORD];
    int cuda;
    unsigned int gpus, instances, processes, rules, xids, nearnesses, wires;
    struct gpu gpu[MOST_GPUS];
    struct gpu instance[MOST_GPUS];
    struct process process[MOST_LINES];
    struct rule rule[MOST_LINES];
    struct xid xid[MOST_LINES];
    struct nearness nearness[MOST_LINES];
    struct wire wire[MOST_LINES];
};

/* A handle means one UUID until the process ends, also across edits of the file. */
struct handle {
    char uuid[WORD];
};

struct event_set {
    int live;
    unsigned long long events[MOST_HANDLES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* protects the variables below */
static struct machine machine;
static struct stat read_state; /* state of the file when it was last read */
static char read_path[PATH_MAX];
static unsigned int initialised;
static struct handle handles[MOST_HANDLES];
static unsigned int handle_count;
static struct event_set event_sets[MOST_EVENT_SETS];
static struct xid told[MOST_LINES]; /* XIDs reported to this process */
static unsigned int told_count;

/* ---- Reading. --------------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static void complain(unsigned int line, const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "nvml_stub: %s line %u: ", read_path, line);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    machine.broken = 1;
}

static int is_number(const char *text, unsigned long long *value) {
    char *end = NULL;
    if (*text < '0' || *text > '9') {
        return 0;
    }
    errno = 0;
    *value = strtoull(text, &end, 10);
    return errno == 0 && *end == '\0';
}

/* Copies the word; returns whether it fits. */
static int copied(char *to, const char *word) {
    size_t length = strlen(word);
    if (length >= WORD) {
        return 0;
    }
    memcpy(to, word, length + 1);
    return 1;
}

/* Splits KEY=VALUE and returns the text of VALUE, NULL without `=`. Sets `value` to the number, else to ABSENT. */
static const char *cut_pair(char *pair, unsigned long long *value) {
    char *text = strchr(pair, '=');
    if (text == NULL) {
        return NULL;
    }
    *text++ = '\0';
    *value = ABSENT;
    (void)(strcmp(text, "-") == 0 || is_number(text, value));
    return text;
}

/* Sets the values of a GPU from words KEY=VALUE; returns whether all are valid. */
static int read_values(unsigned int line, struct gpu *gpu, char **word, unsigned int words) {
    for (unsigned int i = 0; i < words; i++) {
        unsigned long long value;
        const char *text = cut_pair(word[i], &value);
        unsigned int key = 0;
        if (text != NULL && strcmp(word[i], "name") == 0 && copied(gpu->name, text)) {
            for (char *letter = gpu->name; *letter != '\0'; letter++) {
                *letter = *letter == '_' ? ' ' : *letter;
            }
            continue;
        }
        while (key < KEYS && strcmp(word[i], key_names[key]) != 0) {
            key++;
        }
        if (text == NULL || key == KEYS || (value == ABSENT && strcmp(text, "-") != 0)) {
            complain(line, "a GPU has no %s=%s", word[i], text == NULL ? "" : text);
            return 0;
        }
        gpu->value[key] = value;
    }
    return 1;
}

static void read_gpu(unsigned int line, char **word, unsigned int words) {
    struct gpu *gpu = &machine.gpu[machine.gpus];
    if (machine.gpus == MOST_GPUS || words < 2 || !copied(gpu->uuid, word[1])) {
        complain(line, "gpu UUID KEY=VALUE ..., at most %d of them", MOST_GPUS);
        return;
    }
    for (unsigned int i = 0; i < machine.gpus; i++) {
        if (strcmp(machine.gpu[i].uuid, gpu->uuid) == 0) {
            complain(line, "%s is there twice", gpu->uuid);
            return;
        }
    }
    memcpy(gpu->value, key_defaults, sizeof key_defaults);
    (void)copied(gpu->name, "NVIDIA H100 80GB HBM3");
    gpu->parent[0] = '\0';
    gpu->index = machine.gpus;
    gpu->value[BUS] = machine.gpus + 1;
    machine.gpus += (unsigned int)read_values(line, gpu, word + 2, words - 2);
}

static void read_instance(unsigned int line, char **word, unsigned int words) {
    struct gpu *instance = &machine.instance[machine.instances];
    if (machine.instances == MOST_GPUS || words < 4 || !copied(instance->parent, word[1]) ||
        !copied(instance->uuid, word[2]) ||
        snprintf(instance->name, WORD, "NVIDIA H100 80GB HBM3 MIG %s", word[3]) >= WORD) {
        complain(line, "instance UUID UUID PROFILE KEY=VALUE ..., at most %d of them", MOST_GPUS);
        return;
    }
    memcpy(instance->value, key_defaults, sizeof key_defaults);
    instance->value[TOTAL] = 9856;
    instance->value[RESERVED] = instance->value[LOAD] = instance->value[TEMP] = instance->value[POWER] = ABSENT;
    instance->value[ENERGY] = instance->value[MIG] = instance->value[ECC] = instance->value[BUS] = ABSENT;
    machine.instances += (unsigned int)read_values(line, instance, word + 4, words - 4);
}

static void read_process(unsigned int line, char **word, unsigned int words) {
    struct process *process = &machine.process[machine.processes];
    if (machine.processes == MOST_LINES || words < 3 || !copied(process->uuid, word[1])) {
        complain(line, "proc UUID pid=PID ...");
        return;
    }
    process->pid = 0;
    process->memory = process->load = ABSENT;
    process->type = 'C';
    for (unsigned int i = 2; i < words; i++) {
        unsigned long long value;
        const char *text = cut_pair(word[i], &value);
        int number = text != NULL && (value != ABSENT || strcmp(text, "-") == 0);
        if (number && value != ABSENT && strcmp(word[i], "pid") == 0) {
            process->pid = (unsigned int)value;
        } else if (number && strcmp(word[i], "mem") == 0) {
            process->memory = value;
        } else if (number && strcmp(word[i], "util") == 0) {
            process->load = value;
        } else if (text != NULL && strcmp(word[i], "type") == 0 && (strcmp(text, "C") == 0 || strcmp(text, "G") == 0)) {
            process->type = *text;
        } else {
            complain(line, "a process has no %s=%s", word[i], text == NULL ? "" : text);
            return;
        }
    }
    if (process->pid == 0) {
        complain(line, "a process without a pid");
        return;
    }
    machine.processes++;
}

static void read_rule(unsigned int line, char **word, unsigned int words) {
    struct rule *rule = &machine.rule[machine.rules];
    unsigned long long code = 0;
    unsigned int last = words; /* number of words before the code */
    rule->hangs = strcmp(word[0], "hang") == 0;
    if (!rule->hangs) {
        last = is_number(word[words - 1], &code) ? words - 1 : 0;
    }
    rule->code = (int)code;
    rule->uuid[0] = '\0';
    if (machine.rules == MOST_LINES || last < 2 || last > 3 || !copied(rule->function, word[1]) ||
        (last == 3 && !copied(rule->uuid, word[2]))) {
        complain(line, "error FUNCTION [UUID] CODE, or hang FUNCTION [UUID]");
        return;
    }
    machine.rules++;
}

static void read_xid(unsigned int line, char **word, unsigned int words) {
    struct xid *xid = &machine.xid[machine.xids];
    if (machine.xids == MOST_LINES || words < 3 || words > 4 || !copied(xid->uuid, word[1]) ||
        !is_number(word[2], &xid->code) || (words == 4 && !is_number(word[3], &xid->number))) {
        complain(line, "xid UUID CODE [NUMBER]");
        return;
    }
    if (words == 3) { /* equal lines without a number are separate events */
        xid->number = 0;
        for (unsigned int i = 0; i < machine.xids; i++) {
            xid->number += strcmp(machine.xid[i].uuid, xid->uuid) == 0 && machine.xid[i].code == xid->code;
        }
    }
    machine.xids++;
}

static void read_nearness(unsigned int line, char **word, unsigned int words) {
    struct nearness *near = &machine.nearness[machine.nearnesses];
    unsigned long long level;
    if (machine.nearnesses == MOST_LINES || words != 4 || !copied(near->one, word[1]) ||
        !copied(near->other, word[2]) || !is_number(word[3], &level)) {
        complain(line, "topology UUID UUID LEVEL");
        return;
    }
    near->level = (unsigned int)level;
    machine.nearnesses++;
}

static void read_wire(unsigned int line, char **word, unsigned int words) {
    struct wire *wire = &machine.wire[machine.wires];
    unsigned int wanted = strcmp(word[0], "nvlink") == 0 ? 3 : 2;
    wire->other[0] = '\0';
    if (machine.wires == MOST_LINES || words != wanted || !copied(wire->one, word[1]) ||
        (words == 3 && !copied(wire->other, word[2]))) {
        complain(line, "nvlink UUID UUID, or nvswitch UUID");
        return;
    }
    machine.wires++;
}

static void read_line(unsigned int line, char *text) {
    char *word[MOST_WORDS], *rest = NULL;
    unsigned int words = 0;
    unsigned long long value;
    text[strcspn(text, "#")] = '\0';
    for (char *next = strtok_r(text, " \t\r", &rest); next != NULL; next = strtok_r(NULL, " \t\r", &rest)) {
        if (words == MOST_WORDS) {
            complain(line, "too many words");
            return;
        }
        word[words++] = next;
    }
    if (words == 0) {
        return;
    }
    if (strcmp(word[0], "gpu") == 0) {
        read_gpu(line, word, words);
    } else if (strcmp(word[0], "proc") == 0) {
        read_process(line, word, words);
    } else if (strcmp(word[0], "error") == 0 || strcmp(word[0], "hang") == 0) {
        read_rule(line, word, words);
    } else if (strcmp(word[0], "xid") == 0) {
        read_xid(line, word, words);
    } else if (strcmp(word[0], "topology") == 0) {
        read_nearness(line, word, words);
    } else if (strcmp(word[0], "instance") == 0) {
        read_instance(line, word, words);
    } else if (strcmp(word[0], "nvlink") == 0 || strcmp(word[0], "nvswitch") == 0) {
        read_wire(line, word, words);
    } else if (strcmp(word[0], "driver") == 0 && words == 2 && copied(machine.driver, word[1])) {
        return;
    } else if (strcmp(word[0], "cuda") == 0 && words == 2 && is_number(word[1], &value)) {
        machine.cuda = (int)value;
    } else {
        complain(line, "%s is not understood", word[0]);
    }
}

/* Returns the contents of the open file, with a 0 at the end; NULL if it cannot be read. */
static char *whole_text(int file, size_t expected) {
    size_t room = expected + 4096, length = 0;
    char *text = malloc(room);
    while (text != NULL) {
        ssize_t got = read(file, text + length, room - length - 1);
        if (got == 0) {
            text[length] = '\0';
            return text;
        }
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got > 0) {
            length += (size_t)got;
        }
        char *larger = got < 0 ? NULL : realloc(text, length + 4096 > room ? room * 2 : room);
        if (larger == NULL) {
            free(text);
            return NULL;
        }
        room = length + 4096 > room ? room * 2 : room;
        text = larger;
    }
    return NULL;
}

static void forget(void) {
    machine.present = machine.broken = 0; /* with the counts at 0, the old entries are ignored */
    machine.gpus = machine.instances = machine.processes = machine.rules = machine.xids = machine.nearnesses = machine.wires = 0;
}

static int same_state(const struct stat *one, const struct stat *other) {
    return one->st_ino == other->st_ino && one->st_dev == other->st_dev && one->st_size == other->st_size &&
           one->st_mtim.tv_sec == other->st_mtim.tv_sec && one->st_mtim.tv_nsec == other->st_mtim.tv_nsec;
}

/* Reads the file if it has changed. The caller holds the lock. */
static void look_at_file(void) {
    const char *path = getenv("NVML_STUB_FILE");
    struct stat state;
    int file;
    if (path == NULL || strlen(path) >= sizeof read_path || stat(path, &state) != 0) {
        forget();
        return;
    }
    if (machine.present && same_state(&state, &read_state) && strcmp(path, read_path) == 0) {
        return;
    }
    forget();
    file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return;
    }
    /* The state before the read: after a write during the read, the next call reads again. */
    char *text = fstat(file, &read_state) == 0 ? whole_text(file, (size_t)read_state.st_size) : NULL;
    close(file);
    if (text == NULL) {
        return;
    }
    strcpy(read_path, path);
    machine.present = 1;
    strcpy(machine.driver, "550.54.15");
    machine.cuda = 12040;
    char *rest = text;
    for (unsigned int line = 1; rest != NULL; line++) {
        read_line(line, strsep(&rest, "\n"));
    }
    free(text);
}

/* ---- Beginning of every function. ------------------------------------------------------------------------------- */

static int is_handle(nvmlDevice_t device) {
    for (unsigned int i = 0; i < handle_count; i++) {
        if (device == &handles[i]) {
            return 1;
        }
    }
    return 0;
}

static const struct gpu *gpu_of(const char *uuid) {
    for (unsigned int i = 0; i < machine.gpus; i++) {
        if (strcmp(machine.gpu[i].uuid, uuid) == 0) {
            return &machine.gpu[i];
        }
    }
    for (unsigned int i = 0; i < machine.instances; i++) {
        const struct gpu *instance = &machine.instance[i];
        const struct gpu *parent = strcmp(instance->uuid, uuid) == 0 ? gpu_of(instance->parent) : NULL;
        if (parent != NULL && parent->value[MIG] == 1) {
            return instance;
        }
    }
    return NULL;
}

/* Applies the rules for this function and, if it is about one, this GPU. The lock is held, except during a hang. */
static nvmlReturn_t ruled(const char *function, const char *uuid) {
    for (unsigned int i = 0; i < machine.rules; i++) {
        const struct rule *rule = &machine.rule[i];
        int named = strcmp(rule->function, function) == 0 || (uuid != NULL && strcmp(rule->function, "*") == 0);
        int meant = rule->uuid[0] == '\0' || (uuid != NULL && strcmp(rule->uuid, uuid) == 0);
        if (named && meant && rule->hangs) {
            pthread_mutex_unlock(&lock);
            for (;;) {
                pause(); /* signal handlers run, but the call does not return, as in a driver that hangs */
            }
        }
        if (named && meant) {
            return rule->code;
        }
    }
    return SUCCESS;
}

/* Takes the lock and reads the file; returns SUCCESS if the file is valid and the library initialised. */
static nvmlReturn_t begin(void) {
    pthread_mutex_lock(&lock);
    look_at_file();
    if (machine.broken) {
        return UNKNOWN;
    }
    if (initialised == 0) {
        return UNINITIALIZED;
    }
    return SUCCESS;
}

static nvmlReturn_t finish(nvmlReturn_t answer) {
    pthread_mutex_unlock(&lock);
    return answer;
}

/* begin() for a function that is not about a GPU. */
static nvmlReturn_t begin_system(const char *function) {
    nvmlReturn_t answer = begin();
    if (answer == SUCCESS) {
        answer = ruled(function, NULL);
    }
    if (answer == SUCCESS && !machine.present) {
        answer = DRIVER_NOT_LOADED;
    }
    return answer;
}

/* begin() for a function about the GPU of a handle. */
static nvmlReturn_t begin_device(const char *function, nvmlDevice_t device, const struct gpu **gpu) {
    nvmlReturn_t answer = begin();
    if (answer == SUCCESS && !is_handle(device)) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        answer = ruled(function, device->uuid);
    }
    if (answer == SUCCESS) {
        *gpu = gpu_of(device->uuid);
        answer = *gpu == NULL ? GPU_IS_LOST : SUCCESS;
    }
    return answer;
}

static nvmlReturn_t handle_of(const char *uuid, nvmlDevice_t *device) {
    for (unsigned int i = 0; i < handle_count; i++) {
        if (strcmp(handles[i].uuid, uuid) == 0) {
            *device = &handles[i];
            return SUCCESS;
        }
    }
    if (handle_count == MOST_HANDLES) {
        return UNKNOWN;
    }
    strcpy(handles[handle_count].uuid, uuid);
    *device = &handles[handle_count++];
    return SUCCESS;
}

static nvmlReturn_t give_text(const char *from, char *to, unsigned int length) {
    if (to == NULL) {
        return INVALID_ARGUMENT;
    }
    if (strlen(from) >= length) {
        return INSUFFICIENT_SIZE;
    }
    strcpy(to, from);
    return SUCCESS;
}

static nvmlReturn_t give_number(const struct gpu *gpu, enum key key, unsigned int factor, unsigned int *to) {
    if (to == NULL) {
        return INVALID_ARGUMENT;
    }
    if (gpu->value[key] == ABSENT) {
        return NOT_SUPPORTED;
    }
    *to = (unsigned int)gpu->value[key] * factor;
    return SUCCESS;
}

/* ---- The library: start and end. -------------------------------------------------------------------------------- */

static nvmlReturn_t start(const char *function) {
    nvmlReturn_t answer;
    pthread_mutex_lock(&lock);
    look_at_file();
    answer = machine.broken ? UNKNOWN : machine.present ? ruled(function, NULL) : DRIVER_NOT_LOADED;
    initialised += answer == SUCCESS;
    return finish(answer);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return start(__func__);
}

nvmlReturn_t nvmlInit_v2(void) {
    return start(__func__);
}

nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t answer = begin();
    if (answer == SUCCESS) {
        answer = ruled(__func__, NULL);
    }
    initialised -= answer == SUCCESS;
    return finish(answer);
}

const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
    case SUCCESS:
        return "Success";
    case UNINITIALIZED:
        return "Uninitialized";
    case INVALID_ARGUMENT:
        return "Invalid Argument";
    case NOT_SUPPORTED:
        return "Not Supported";
    case 4:
        return "Insufficient Permissions";
    case NOT_FOUND:
        return "Not Found";
    case INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case TIMEOUT:
        return "Timeout";
    case 12:
        return "NVML Shared Library Not Found";
    case 13:
        return "Function Not Found";
    case GPU_IS_LOST:
        return "GPU is lost";
    case 16:
        return "GPU requires reset";
    case 18:
        return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    default:
        return "Unknown Error";
    }
}

/* ---- The machine. ----------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    nvmlReturn_t answer = begin_system(__func__);
    return finish(answer != SUCCESS ? answer : give_text(machine.driver, version, length));
}

static nvmlReturn_t cuda_version(const char *function, int *version) {
    nvmlReturn_t answer = begin_system(function);
    if (answer == SUCCESS && version == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        *version = machine.cuda;
    }
    return finish(answer);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return cuda_version(__func__, version);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return cuda_version(__func__, version);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t answer = begin_system(__func__);
    if (answer == SUCCESS && count == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        *count = machine.gpus;
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    nvmlReturn_t answer = begin();
    if (answer == SUCCESS && (index >= machine.gpus || device == NULL)) {
        answer = ruled(__func__, NULL);
        answer = answer == SUCCESS ? INVALID_ARGUMENT : answer;
    }
    if (answer == SUCCESS) {
        answer = ruled(__func__, machine.gpu[index].uuid);
    }
    return finish(answer != SUCCESS ? answer : handle_of(machine.gpu[index].uuid, device));
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t answer = begin();
    if (answer == SUCCESS && (uuid == NULL || device == NULL)) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        answer = ruled(__func__, uuid);
    }
    if (answer == SUCCESS && gpu_of(uuid) == NULL) {
        answer = NOT_FOUND;
    }
    return finish(answer != SUCCESS ? answer : handle_of(uuid, device));
}

/* ---- One GPU. --------------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && index == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        *index = gpu->index;
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    return finish(answer != SUCCESS ? answer : give_text(gpu->uuid, uuid, length));
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    return finish(answer != SUCCESS ? answer : give_text(gpu->name, name, length));
}

static void give_pci(unsigned int bus, unsigned int kind, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = bus & 0xFFU;
    pci->pciDeviceId = kind;
    pci->pciSubSystemId = 0x16C110DEU;
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && (pci == NULL || gpu->value[BUS] == ABSENT)) {
        answer = pci == NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
    }
    if (answer == SUCCESS) {
        give_pci((unsigned int)gpu->value[BUS], PCI_OF_GPU, pci);
    }
    return finish(answer);
}

/* Bytes: total, reserved by the driver, used by processes, free. */
static nvmlReturn_t memory_of(const struct gpu *gpu, nvmlMemory_v2_t *memory) {
    if (gpu->value[TOTAL] == ABSENT || gpu->value[USED] == ABSENT) {
        return NOT_SUPPORTED;
    }
    memory->total = gpu->value[TOTAL] * MIB;
    memory->used = gpu->value[USED] * MIB;
    memory->reserved = gpu->value[RESERVED] == ABSENT ? 0 : gpu->value[RESERVED] * MIB;
    memory->free = memory->used + memory->reserved < memory->total ? memory->total - memory->used - memory->reserved : 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    const struct gpu *gpu;
    nvmlMemory_v2_t known;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS) {
        answer = memory == NULL ? INVALID_ARGUMENT : memory_of(gpu, &known);
    }
    if (answer == SUCCESS) { /* the first version counts reserved memory as used */
        memory->total = known.total;
        memory->used = known.used + known.reserved;
        memory->free = known.free;
    }
    return finish(answer);
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && (memory == NULL || memory->version != MEMORY_V2_VERSION)) {
        answer = memory == NULL ? INVALID_ARGUMENT : ARGUMENT_VERSION_MISMATCH;
    }
    return finish(answer != SUCCESS ? answer : memory_of(gpu, memory));
}
#endif

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *load) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && (gpu->value[MIG] == 1 || gpu->parent[0] != '\0')) {
        answer = NOT_SUPPORTED;
    }
    if (answer == SUCCESS) {
        answer = load == NULL ? INVALID_ARGUMENT : give_number(gpu, LOAD, 1, &load->gpu);
    }
    if (answer == SUCCESS) {
        load->memory = load->gpu / 2;
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *after_reset) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS) {
        answer = give_number(gpu, MIG, 1, now);
    }
    return finish(answer != SUCCESS ? answer : give_number(gpu, MIG, 1, after_reset));
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && count == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        *count = gpu->value[MIG] == ABSENT ? 0 : 7;
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int number, nvmlDevice_t *instance) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && (instance == NULL || number >= 7)) {
        answer = INVALID_ARGUMENT;
    }
    if (answer != SUCCESS) {
        return finish(answer);
    }
    for (unsigned int i = 0; gpu->value[MIG] == 1 && i < machine.instances; i++) {
        if (strcmp(machine.instance[i].parent, gpu->uuid) == 0 && number-- == 0) {
            return finish(handle_of(machine.instance[i].uuid, instance));
        }
    }
    return finish(NOT_FOUND);
}

/* Returns the number of the GPU instance of a MIG instance, and the UUID of its GPU; NO_INSTANCE and `uuid` for a GPU. */
static unsigned int gpu_instance(const char *uuid, const char **reporter) {
    for (unsigned int i = 0; i < machine.instances; i++) {
        if (strcmp(machine.instance[i].uuid, uuid) == 0) {
            *reporter = machine.instance[i].parent;
            return i + 1;
        }
    }
    *reporter = uuid;
    return NO_INSTANCE;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *number) {
    const struct gpu *gpu;
    const char *parent;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && (number == NULL || gpu->parent[0] == '\0')) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        *number = gpu_instance(gpu->uuid, &parent);
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int type, unsigned int counter,
                                         unsigned long long *errors) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && (errors == NULL || type > 1 || counter > 1)) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS && gpu->value[ECC] == ABSENT) {
        answer = NOT_SUPPORTED;
    }
    if (answer == SUCCESS) {
        *errors = type == 1 ? gpu->value[ECC] : 0; /* the file has only uncorrected errors */
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && sensor != 0) {
        answer = INVALID_ARGUMENT;
    }
    return finish(answer != SUCCESS ? answer : give_number(gpu, TEMP, 1, celsius));
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    return finish(answer != SUCCESS ? answer : give_number(gpu, POWER, 1000, milliwatts));
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && (millijoules == NULL || gpu->value[ENERGY] == ABSENT)) {
        answer = millijoules == NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
    }
    if (answer == SUCCESS) {
        *millijoules = gpu->value[ENERGY] * 1000;
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, unsigned int *level) {
    const struct gpu *first, *second;
    nvmlReturn_t answer = begin_device(__func__, one, &first);
    finish(answer);
    if (answer != SUCCESS) {
        return answer;
    }
    answer = begin_device(__func__, other, &second);
    if (answer == SUCCESS) {
        first = gpu_of(one->uuid); /* the lock was released in between */
        answer = first == NULL ? GPU_IS_LOST : level == NULL ? INVALID_ARGUMENT : SUCCESS;
    }
    if (answer == SUCCESS) { /* default: four GPUs per socket */
        *level = first == second ? 0 : first->index / 4 == second->index / 4 ? 40 : 50;
        for (unsigned int i = 0; i < machine.nearnesses; i++) {
            const struct nearness *near = &machine.nearness[i];
            if ((strcmp(near->one, one->uuid) == 0 && strcmp(near->other, other->uuid) == 0) ||
                (strcmp(near->one, other->uuid) == 0 && strcmp(near->other, one->uuid) == 0)) {
                *level = near->level;
            }
        }
    }
    return finish(answer);
}

/* Begins a function about one NVLink of a GPU. `*far`: UUID at its other end, empty: a switch, NULL: inactive. */
static nvmlReturn_t begin_link(const char *function, nvmlDevice_t device, unsigned int link, const char **far) {
    const struct gpu *gpu;
    unsigned int number = 0;
    nvmlReturn_t answer = begin_device(function, device, &gpu);
    *far = NULL;
    for (unsigned int i = 0; answer == SUCCESS && i < machine.wires; i++) {
        const struct wire *wire = &machine.wire[i];
        int first = strcmp(wire->one, gpu->uuid) == 0;
        if (!first && strcmp(wire->other, gpu->uuid) != 0) {
            continue;
        }
        if (number++ == link) {
            *far = first ? wire->other : wire->one;
        }
    }
    if (answer == SUCCESS && number == 0) {
        answer = NOT_SUPPORTED; /* a GPU without NVLink */
    }
    return answer == SUCCESS && link >= MOST_LINKS ? INVALID_ARGUMENT : answer;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active) {
    const char *far;
    nvmlReturn_t answer = begin_link(__func__, device, link, &far);
    if (answer == SUCCESS && active == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        *active = far != NULL;
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
    const char *far;
    nvmlReturn_t answer = begin_link(__func__, device, link, &far);
    if (answer == SUCCESS && (pci == NULL || far == NULL)) {
        answer = pci == NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
    }
    if (answer == SUCCESS && *far == '\0') {
        give_pci(BUS_OF_SWITCH, PCI_OF_SWITCH, pci);
    } else if (answer == SUCCESS) {
        const struct gpu *there = gpu_of(far);
        give_pci(there == NULL ? BUS_OF_HIDDEN_GPU : (unsigned int)there->value[BUS], PCI_OF_GPU, pci);
    }
    return finish(answer);
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *type) {
    const char *far;
    nvmlReturn_t answer = begin_link(__func__, device, link, &far);
    if (answer == SUCCESS && (type == NULL || far == NULL)) {
        answer = type == NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
    }
    if (answer == SUCCESS) {
        *type = *far == '\0' ? 2 : 0; /* a switch; a GPU */
    }
    return finish(answer);
}
#endif

/* ---- Its processes. --------------------------------------------------------------------------------------------- */

static nvmlReturn_t running(const char *function, nvmlDevice_t device, char type, unsigned int *count,
                            nvmlProcessInfo_t *infos) {
    const struct gpu *gpu;
    unsigned int found = 0, room;
    nvmlReturn_t answer = begin_device(function, device, &gpu);
    if (answer == SUCCESS && count == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer != SUCCESS) {
        return finish(answer);
    }
    room = infos == NULL ? 0 : *count;
    for (unsigned int i = 0; i < machine.processes; i++) {
        const struct process *process = &machine.process[i];
        if (process->type != type || strcmp(process->uuid, gpu->uuid) != 0) {
            continue;
        }
        if (found < room) {
            unsigned long long bytes = process->memory == ABSENT ? ABSENT : process->memory * MIB;
            infos[found] = (nvmlProcessInfo_t){process->pid, bytes, NO_INSTANCE, NO_INSTANCE};
        }
        found++;
    }
    *count = found;
    return finish(found > room ? INSUFFICIENT_SIZE : SUCCESS);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos) {
    return running(__func__, device, 'C', count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos) {
    return running(__func__, device, 'G', count, infos);
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos) {
    return running(__func__, device, 'C', count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos) {
    return running(__func__, device, 'G', count, infos);
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *count, unsigned long long last_seen) {
    const struct gpu *gpu;
    struct timespec now;
    unsigned int found = 0, room;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && count == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS && (gpu->value[MIG] == 1 || gpu->parent[0] != '\0')) {
        answer = NOT_SUPPORTED;
    }
    if (answer != SUCCESS) {
        return finish(answer);
    }
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long micros = (unsigned long long)now.tv_sec * 1000000ULL + (unsigned long long)now.tv_nsec / 1000ULL;
    room = samples == NULL ? 0 : *count;
    for (unsigned int i = 0; i < machine.processes; i++) {
        const struct process *process = &machine.process[i];
        if (process->load == ABSENT || micros <= last_seen || strcmp(process->uuid, gpu->uuid) != 0) {
            continue;
        }
        if (found < room) {
            unsigned int load = (unsigned int)process->load;
            samples[found] = (nvmlProcessUtilizationSample_t){process->pid, micros, load, load / 2, 0, 0};
        }
        found++;
    }
    *count = found;
    return finish(found == 0 ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : SUCCESS);
}
#endif

/* ---- Events. ---------------------------------------------------------------------------------------------------- */

static int is_event_set(nvmlEventSet_t set) {
    for (unsigned int i = 0; i < MOST_EVENT_SETS; i++) {
        if (set == &event_sets[i]) {
            return set->live;
        }
    }
    return 0;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    nvmlReturn_t answer = begin_system(__func__);
    if (answer == SUCCESS && set == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer != SUCCESS) {
        return finish(answer);
    }
    for (unsigned int i = 0; i < MOST_EVENT_SETS; i++) {
        if (!event_sets[i].live) {
            memset(&event_sets[i], 0, sizeof event_sets[i]);
            event_sets[i].live = 1;
            *set = &event_sets[i];
            return finish(SUCCESS);
        }
    }
    return finish(UNKNOWN);
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    nvmlReturn_t answer = begin();
    if (answer == SUCCESS) {
        answer = ruled(__func__, NULL);
    }
    if (answer == SUCCESS && !is_event_set(set)) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        set->live = 0;
    }
    return finish(answer);
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && types == NULL) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS) {
        *types = EVENT_XID;
    }
    return finish(answer);
}

static int is_told(const struct xid *xid) {
    for (unsigned int i = 0; i < told_count; i++) {
        if (told[i].code == xid->code && told[i].number == xid->number && strcmp(told[i].uuid, xid->uuid) == 0) {
            return 1;
        }
    }
    return 0;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    const struct gpu *gpu;
    nvmlReturn_t answer = begin_device(__func__, device, &gpu);
    if (answer == SUCCESS && !is_event_set(set)) {
        answer = INVALID_ARGUMENT;
    }
    if (answer == SUCCESS && (types & ~EVENT_XID) != 0) {
        answer = NOT_SUPPORTED;
    }
    if (answer == SUCCESS) {
        for (unsigned int i = 0; i < machine.xids; i++) { /* earlier events are not reported */
            const struct xid *xid = &machine.xid[i];
            const char *reporter;
            (void)gpu_instance(xid->uuid, &reporter);
            if (strcmp(reporter, device->uuid) == 0 && !(set->events[device - handles] & EVENT_XID) &&
                !is_told(xid) && told_count < MOST_LINES) {
                told[told_count++] = *xid;
            }
        }
        set->events[device - handles] |= types;
    }
    return finish(answer);
}

/* Returns whether there is an event to report, and marks it as reported. The lock is held. */
static int next_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    for (unsigned int i = 0; i < machine.xids; i++) {
        const struct xid *xid = &machine.xid[i];
        const char *reporter;
        unsigned int number = gpu_instance(xid->uuid, &reporter);
        if (is_told(xid) || told_count == MOST_LINES) {
            continue;
        }
        for (unsigned int j = 0; j < handle_count; j++) {
            if (strcmp(handles[j].uuid, reporter) == 0 && (set->events[j] & EVENT_XID) != 0) {
                told[told_count++] = *xid;
                *data = (nvmlEventData_t){&handles[j], EVENT_XID, xid->code, number, NO_INSTANCE};
                return 1;
            }
        }
    }
    return 0;
}

static unsigned long long milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000ULL + (unsigned long long)now.tv_nsec / 1000000ULL;
}

static nvmlReturn_t wait_for_event(const char *function, nvmlEventSet_t set, nvmlEventData_t *data,
                                   unsigned int timeout) {
    unsigned long long end = milliseconds() + timeout;
    for (;;) {
        nvmlReturn_t answer = begin_system(function);
        if (answer == SUCCESS && !is_event_set(set)) {
            answer = INVALID_ARGUMENT;
        }
        if (answer != SUCCESS || next_event(set, data)) {
            return finish(answer);
        }
        finish(SUCCESS);
        unsigned long long now = milliseconds();
        if (now >= end) {
            return TIMEOUT;
        }
        unsigned long long rest = end - now < LOOK_AGAIN_MS ? end - now : LOOK_AGAIN_MS;
        nanosleep(&(struct timespec){0, (long)rest * 1000000L}, NULL);
    }
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout) {
    return data == NULL ? INVALID_ARGUMENT : wait_for_event(__func__, set, data, timeout);
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned int timeout) {
    nvmlEventData_t whole;
    nvmlReturn_t answer = data == NULL ? INVALID_ARGUMENT : wait_for_event(__func__, set, &whole, timeout);
    if (answer == SUCCESS) { /* the structure of the first version is smaller */
        *data = (nvmlEventData_v1_t){whole.device, whole.eventType, whole.eventData};
    }
    return answer;
}
