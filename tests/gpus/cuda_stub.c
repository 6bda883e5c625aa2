/* A fake of libcuda.so.1 with one GPU, for programs that take memory by the CUDA driver API without a context of CUDA's
 * runtime. CUDA_STUB_MIB: the memory of the GPU; more cannot be taken. The layouts and codes are the ABI of cuda.h. */

#include <stddef.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

typedef int CUresult;
typedef int CUdevice;
typedef struct context *CUcontext;
typedef unsigned long long CUdeviceptr;
typedef struct {
    char bytes[16];
} CUuuid;

static struct context {
    size_t taken;
} context;
static CUcontext current;
static int initialized, retained;

CUresult cuInit(unsigned int flags)
{
    initialized = flags == 0;
    return initialized ? SUCCESS : INVALID_VALUE;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (!initialized)
        return NOT_INITIALIZED;
    if (ordinal)
        return INVALID_DEVICE;
    *device = 0;
    return SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    if (device)
        return INVALID_DEVICE;
    for (int n = 0; n < 16; n++)
        uuid->bytes[n] = (char)(0xf0 + n);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device)
{
    if (device)
        return INVALID_DEVICE;
    *made = &context;
    retained = 1;
    return SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext given)
{
    if (!retained || given != &context)
        return INVALID_CONTEXT;
    current = given;
    return SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    const char *mib = getenv("CUDA_STUB_MIB");
    size_t total = (size_t)atoll(mib ? mib : "0") << 20;
    if (!current)
        return INVALID_CONTEXT;
    if (bytes > total - current->taken)
        return OUT_OF_MEMORY;
    current->taken += bytes;
    *address = 0x7f0000000000ULL + current->taken;
    return SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char **text)
{
    *text = code == INVALID_DEVICE ? "invalid device ordinal" : "another error";
    return SUCCESS;
}
