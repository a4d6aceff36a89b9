/*
 * libcuda.so.1 of the test machine: just enough of the CUDA driver to say which GPUs a program
 * sees and in which order, from the same script as nvml.c (script.h).
 *
 * As in CUDA, the environment is read by cuInit, and a process forked after cuInit cannot use
 * CUDA at all.
 */
#define _GNU_SOURCE
#include "script.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/types.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
};

static const Target NOWHERE = {NONE, NONE};

/* ------------------------------------------------------------------ which devices are visible */

typedef struct {
    Target places[MAX_GPUS];
    int count;
} Devices;

static bool uses_mig(const Device *gpu)
{
    return gpu->numbers[FIELD_mig_mode].value == 1;
}

static const Device *first_mig(const Script *script)
{
    for (int gpu = 0; gpu < script->gpu_count; gpu++)
        for (int mig = 0; mig < MAX_MIGS; mig++)
            if (script->gpus[gpu]->migs[mig] != NULL)
                return script->gpus[gpu]->migs[mig];
    return NULL;
}

/* What CUDA sees without CUDA_VISIBLE_DEVICES: the GPUs that are not divided, in CUDA's order;
 * if all are divided, one MIG device. */
static Devices all_devices(const Script *script)
{
    Devices all = {.count = 0};
    const char *order = getenv("CUDA_DEVICE_ORDER");
    bool by_bus = order != NULL && strcmp(order, "PCI_BUS_ID") == 0;
    for (int place = 0; place < script->gpu_count; place++) {
        const Device *gpu = script->gpus[by_bus ? place : script->cuda_order[place]];
        if (!uses_mig(gpu))
            all.places[all.count++] = gpu->place;
    }
    if (all.count == 0 && first_mig(script) != NULL)
        all.places[all.count++] = first_mig(script)->place;
    return all;
}

/* An entry of CUDA_VISIBLE_DEVICES is an index, a GPU's UUID or a MIG device's. */
static char form_of(const char *entry)
{
    if (strncmp(entry, "GPU-", 4) == 0)
        return 'G';
    if (strncmp(entry, "MIG-", 4) == 0)
        return 'M';
    return isdigit((unsigned char)*entry) ? 'I' : '?';
}

/* Leading digits count: "1gpu2" is 1 and "0-2" is 0. */
static Target by_index(const Devices *all, const char *entry)
{
    long index = strtol(entry, NULL, 10);
    return index < all->count ? all->places[index] : NOWHERE;
}

/* The start of a UUID is enough if only one device has it. */
static Target by_uuid(Script *script, const Devices *all, const char *entry)
{
    Target found = NOWHERE;
    for (int index = 0; index < all->count; index++) {
        const Device *device = script_device(script, all->places[index]);
        if (strncasecmp(device->uuid, entry, strlen(entry)) != 0)
            continue;
        if (found.gpu >= 0)
            return NOWHERE;
        found = device->place;
    }
    return found;
}

static Target by_mig_uuid(const Script *script, const char *entry)
{
    for (int gpu = 0; gpu < script->gpu_count; gpu++) {
        for (int mig = 0; mig < MAX_MIGS; mig++) {
            const Device *device = script->gpus[gpu]->migs[mig];
            if (device != NULL && strcasecmp(device->uuid, entry) == 0)
                return device->place;
        }
    }
    return NOWHERE;
}

static Target find(Script *script, const Devices *all, const char *entry)
{
    switch (form_of(entry)) {
    case 'I':
        return by_index(all, entry);
    case 'G':
        return by_uuid(script, all, entry);
    case 'M':
        return by_mig_uuid(script, entry);
    default:
        return NOWHERE;
    }
}

static bool contains(const Devices *devices, Target place)
{
    for (int index = 0; index < devices->count; index++)
        if (devices->places[index].gpu == place.gpu && devices->places[index].mig == place.mig)
            return true;
    return false;
}

/* The list ends at the first entry that is wrong or of another form; a repeat voids it. */
static Devices chosen_devices(Script *script, const Devices *all, char *list)
{
    Devices chosen = {.count = 0};
    char form = '\0';
    for (char *entry; (entry = strsep(&list, ",")) != NULL;) {
        entry += strspn(entry, " ");
        Target place = find(script, all, entry);
        if (place.gpu < 0 || (form != '\0' && form != form_of(entry)))
            break;
        if (contains(&chosen, place))
            return (Devices){.count = 0};
        form = form_of(entry);
        chosen.places[chosen.count++] = place;
        if (form == 'M') /* a process can use one MIG device only */
            break;
    }
    return chosen;
}

static Devices visible_devices(Script *script)
{
    Devices all = all_devices(script);
    const char *variable = getenv("CUDA_VISIBLE_DEVICES");
    if (variable == NULL)
        return all;
    char *list = strdup(variable);
    Devices chosen = chosen_devices(script, &all, list);
    free(list);
    return chosen;
}

/* ------------------------------------------------------------------ a call */

static struct {
    pid_t pid; /* 0: cuInit was not called */
    Devices devices;
} cuda;

typedef struct {
    const char *function;
    Script *script;
    Device *device;
    CUresult result;
} Call;

/* The error that the script wants, or that of a process that inherited CUDA by fork. */
static Call open_call(const char *function)
{
    script_lock();
    Call call = {.function = function, .script = script_now()};
    const Rule *error = NULL;
    if (call.script != NULL)
        error = rule_for_call(&call.script->cuda_errors, function, NOWHERE);
    if (error != NULL)
        call.result = (CUresult)error->value;
    else if (cuda.pid != 0 && cuda.pid != getpid())
        call.result = CUDA_ERROR_NOT_INITIALIZED;
    else if (call.script == NULL)
        call.result = CUDA_ERROR_NO_DEVICE;
    return call;
}

static CUresult close_call(const Call *call)
{
    Target place = call->device != NULL ? call->device->place : NOWHERE;
    log_call(call->function, place, call->result);
    script_unlock();
    return call->result;
}

/* A call after cuInit. */
static Call begin(const char *function)
{
    Call call = open_call(function);
    if (call.result == CUDA_SUCCESS && cuda.pid == 0)
        call.result = CUDA_ERROR_NOT_INITIALIZED;
    return call;
}

/* A call about one device. */
static Call begin_device(const char *function, CUdevice device)
{
    Call call = begin(function);
    if (call.result != CUDA_SUCCESS)
        return call;
    if (device >= 0 && device < cuda.devices.count)
        call.device = script_device(call.script, cuda.devices.places[device]);
    if (call.device == NULL)
        call.result = CUDA_ERROR_INVALID_DEVICE;
    return call;
}

/* ------------------------------------------------------------------ the functions */

CUresult cuInit(unsigned flags)
{
    (void)flags;
    Call call = open_call(__func__);
    if (call.result == CUDA_SUCCESS) {
        cuda.devices = visible_devices(call.script);
        cuda.pid = getpid();
        if (cuda.devices.count == 0) {
            cuda.pid = 0;
            call.result = CUDA_ERROR_NO_DEVICE;
        }
    }
    return close_call(&call);
}

CUresult cuDriverGetVersion(int *version)
{
    Call call = open_call(__func__);
    if (call.result == CUDA_SUCCESS)
        *version = call.script->cuda;
    return close_call(&call);
}

CUresult cuDeviceGetCount(int *count)
{
    Call call = begin(__func__);
    if (call.result == CUDA_SUCCESS)
        *count = cuda.devices.count;
    return close_call(&call);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    Call call = begin_device(__func__, ordinal);
    if (call.result == CUDA_SUCCESS)
        *device = ordinal;
    return close_call(&call);
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    Call call = begin_device(__func__, device);
    if (call.result == CUDA_SUCCESS && size < 1)
        call.result = CUDA_ERROR_INVALID_VALUE;
    if (call.result == CUDA_SUCCESS)
        snprintf(name, (size_t)size, "%s", call.device->name);
    return close_call(&call);
}

/* "GPU-0f1e..." in 16 bytes */
static CUuuid to_bytes(const char *uuid)
{
    CUuuid raw = {{0}};
    const char *digit = uuid + strlen("GPU-");
    for (int index = 0; index < 16; index++) {
        unsigned byte = 0;
        digit += strspn(digit, "-");
        if (sscanf(digit, "%2x", &byte) != 1)
            break;
        raw.bytes[index] = (unsigned char)byte;
        digit += 2;
    }
    return raw;
}

/* Version 1 gives the UUID of the GPU, version 2 that of the MIG device. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    Call call = begin_device(__func__, device);
    if (call.result == CUDA_SUCCESS)
        *uuid = to_bytes(call.script->gpus[call.device->place.gpu]->uuid);
    return close_call(&call);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    Call call = begin_device(__func__, device);
    if (call.result == CUDA_SUCCESS)
        *uuid = to_bytes(call.device->uuid);
    return close_call(&call);
}

/* For the messages of nvitop's binding. */
CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = error == CUDA_ERROR_NO_DEVICE         ? "CUDA_ERROR_NO_DEVICE"
            : error == CUDA_ERROR_NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
                                                  : "CUDA_ERROR_OF_THE_SCRIPT";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    return cuGetErrorName(error, text);
}
