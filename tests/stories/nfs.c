// Every folder looks as if it were on NFS (statfs(2)); for LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/vfs.h>

int statfs(const char *path, struct statfs *found)
{
    int (*real)(const char *, struct statfs *) = dlsym(RTLD_NEXT, "statfs");
    int code = real(path, found);
    if (!code)
        found->f_type = 0x6969;
    return code;
}
