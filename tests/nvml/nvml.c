/*
 * libnvidia-ml.so.1 of the test machine: NVML's C ABI over the GPUs of a script.
 *
 * The signatures, struct layouts and error codes are NVML's, so that nvidia-ml-py, nvitop,
 * gpustat and nvtop run on it unmodified. What it reports comes from the script (script.h).
 *
 * Every function has the same three steps: open_call takes the lock and the current script,
 * admit decides whether the call gets as far as the function itself (symbol missing, NVML not
 * initialised, injected error, bad handle, lost GPU), close_call writes the log, gives up the
 * lock and sleeps for the latency that the script asks for, or until it asks for none.
 */
#define _GNU_SOURCE
#include "script.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------------------ NVML's types */

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};

/* A struct that carries its version has its size in the low bits and the version on top. */
#define STRUCT_VERSION(type, version) ((unsigned)(sizeof(type) | ((unsigned)(version) << 24)))

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlBAR1Memory_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned version;
    unsigned sensorType;
    int temperature;
} nvmlTemperature_t;

typedef struct {
    unsigned version, value;
} nvmlDeviceAddressingMode_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

typedef struct {
    unsigned version, mode, numProcArrayEntries;
    nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_t;

typedef struct {
    unsigned pid;
    unsigned long long timeStamp;
    unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef union {
    double dVal;
    unsigned uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
} nvmlValue_t;

enum { VALUE_UNSIGNED_INT = 1, VALUE_UNSIGNED_LONG_LONG = 3 };

typedef struct {
    unsigned long long timeStamp;
    nvmlValue_t sampleValue;
} nvmlSample_t;

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
        sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct {
    unsigned long long protectedMemSizeKib, unprotectedMemSizeKib;
} nvmlConfComputeMemSizeInfo_t;

typedef struct {
    unsigned gpuUtilization, memoryUtilization;
    unsigned long long maxMemoryUsage, time, startTime;
    unsigned isRunning, reserved[5];
} nvmlAccountingStats_t;

/* ------------------------------------------------------------------ handles */

/*
 * A handle is the address of a slot that nobody reads: a place for each GPU and MIG device that
 * there can be. So a handle outlives a change of the script, and a wrong one is recognised.
 */
static char gpu_slots[MAX_GPUS];
static char mig_slots[MAX_GPUS][MAX_MIGS];

static const Target NOWHERE = {NONE, NONE};

static nvmlDevice_t handle_of(Target place)
{
    char *slot = place.mig < 0 ? &gpu_slots[place.gpu] : &mig_slots[place.gpu][place.mig];
    return (nvmlDevice_t)(void *)slot;
}

static Target place_of(nvmlDevice_t handle)
{
    uintptr_t address = (uintptr_t)handle;
    uintptr_t gpu = address - (uintptr_t)gpu_slots;
    uintptr_t mig = address - (uintptr_t)mig_slots;
    if (gpu < sizeof gpu_slots)
        return (Target){(int)gpu, NONE};
    if (mig < sizeof mig_slots)
        return (Target){(int)(mig / MAX_MIGS), (int)(mig % MAX_MIGS)};
    return NOWHERE;
}

/* ------------------------------------------------------------------ a call */

typedef struct {
    const char *function;
    Script *script; /* NULL: no driver */
    Target place;
    Device *device; /* at that place, if there is one */
    nvmlReturn_t result;
} Call;

/* NVML counts nvmlInit against nvmlShutdown. A forked child has to start for itself: what it
 * inherits is the parent's, which is how a test sees that a library forgot this. */
static struct {
    unsigned users;
    pid_t pid;
} initialised;

static bool is_initialised(void)
{
    return initialised.users > 0 && initialised.pid == getpid();
}

static Call open_call(const char *function)
{
    script_lock();
    return (Call){.function = function, .script = script_now(), .place = NOWHERE};
}

static long latency_us(const Call *call)
{
    if (call->script == NULL || call->script->latencies.count == 0)
        return 0;
    const Rule *rule = rule_for_call(&call->script->latencies, call->function, call->place);
    return rule != NULL ? rule->value : 0;
}

static bool is_without_latencies(void)
{
    script_lock();
    const Script *script = script_now();
    bool is_without = script != NULL && script->latencies.count == 0;
    script_unlock();
    return is_without;
}

/* Until then, or until the script has no latency any more: so a test can end a hang of any length
 * when it has seen what it wanted, and need not guess how long that takes. */
static void sleep_until(int64_t end_ns)
{
    const int64_t longest_ns = 5000000;
    for (int64_t left_ns; (left_ns = end_ns - monotonic_ns()) > 0;) {
        int64_t slice_ns = left_ns < longest_ns ? left_ns : longest_ns;
        nanosleep(&(struct timespec){0, (long)slice_ns}, NULL);
        if (slice_ns == longest_ns && is_without_latencies())
            return;
    }
}

/* The sleep is outside the lock: a slow GPU does not stop calls to another one. */
static nvmlReturn_t close_call(const Call *call)
{
    long delay = latency_us(call);
    log_call(call->function, call->place, call->result);
    script_unlock();
    if (delay > 0)
        sleep_until(monotonic_ns() + (int64_t)delay * 1000);
    return call->result;
}

/* What is wrong with the call as such, before it is known what it is about. */
static nvmlReturn_t refusal(const Call *call, bool needs_init)
{
    Script *script = call->script;
    if (script != NULL && rule_for_call(&script->missing, call->function, call->place) != NULL)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (needs_init && !is_initialised())
        return NVML_ERROR_UNINITIALIZED;
    if (script == NULL)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    const Rule *error = rule_for_call(&script->errors, call->function, call->place);
    return error != NULL ? (nvmlReturn_t)error->value : NVML_SUCCESS;
}

/* A call about the machine. */
static bool admit(Call *call)
{
    call->result = refusal(call, true);
    return call->result == NVML_SUCCESS;
}

/* A call about one device; absent is the answer if there is no such device. */
static bool admit_device(Call *call, Target place, nvmlReturn_t absent)
{
    call->place = place;
    if (!admit(call))
        return false;
    call->device = script_device(call->script, place);
    if (call->device == NULL)
        call->result = absent;
    else if (call->script->gpus[place.gpu]->lost)
        call->result = NVML_ERROR_GPU_IS_LOST;
    return call->result == NVML_SUCCESS;
}

/* A call with a handle. The call goes on if its result is NVML_SUCCESS. */
static Call begin(const char *function, nvmlDevice_t handle)
{
    Call call = open_call(function);
    admit_device(&call, place_of(handle), NVML_ERROR_INVALID_ARGUMENT);
    return call;
}

/* ------------------------------------------------------------------ answers */

static nvmlReturn_t read_number(const Call *call, FieldId field, uint64_t *value)
{
    *value = number_now(call->script, call->device, field);
    return *value == NOT_AVAILABLE ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

static nvmlReturn_t answer_uint(const Call *call, FieldId field, unsigned *out)
{
    uint64_t value;
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = read_number(call, field, &value);
    if (result == NVML_SUCCESS)
        *out = (unsigned)value;
    return result;
}

static nvmlReturn_t answer_ulonglong(const Call *call, FieldId field, unsigned long long *out)
{
    uint64_t value;
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = read_number(call, field, &value);
    if (result == NVML_SUCCESS)
        *out = value;
    return result;
}

static nvmlReturn_t answer_text(const char *text, char *out, unsigned size)
{
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strcmp(text, "NA") == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

static nvmlReturn_t answer_int(int value, int *out)
{
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = value;
    return NVML_SUCCESS;
}

/* Whole functions: a handle in, a number out. */

static nvmlReturn_t query_uint(const char *function, nvmlDevice_t handle, FieldId field,
                               unsigned *out)
{
    Call call = begin(function, handle);
    if (call.result == NVML_SUCCESS)
        call.result = answer_uint(&call, field, out);
    return close_call(&call);
}

static nvmlReturn_t query_two_uints(const char *function, nvmlDevice_t handle, FieldId first,
                                    unsigned *first_out, FieldId second, unsigned *second_out)
{
    Call call = begin(function, handle);
    if (call.result == NVML_SUCCESS)
        call.result = answer_uint(&call, first, first_out);
    if (call.result == NVML_SUCCESS)
        call.result = answer_uint(&call, second, second_out);
    return close_call(&call);
}

static nvmlReturn_t query_ulonglong(const char *function, nvmlDevice_t handle, FieldId field,
                                    unsigned long long *out)
{
    Call call = begin(function, handle);
    if (call.result == NVML_SUCCESS)
        call.result = answer_ulonglong(&call, field, out);
    return close_call(&call);
}

/* One of several fields, chosen by a number of the caller; the caller may choose a wrong one. */
static nvmlReturn_t query_choice(const char *function, nvmlDevice_t handle, const FieldId *fields,
                                 size_t count, unsigned choice, unsigned *out)
{
    Call call = begin(function, handle);
    if (call.result == NVML_SUCCESS)
        call.result = choice < count ? answer_uint(&call, fields[choice], out)
                                     : NVML_ERROR_INVALID_ARGUMENT;
    return close_call(&call);
}

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

#define UINT_QUERY(symbol, field) \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned *value) \
    { \
        return query_uint(__func__, device, FIELD_##field, value); \
    }

#define TWO_UINTS_QUERY(symbol, first, second) \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned *one, unsigned *two) \
    { \
        return query_two_uints(__func__, device, FIELD_##first, one, FIELD_##second, two); \
    }

#define ULONGLONG_QUERY(symbol, field) \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned long long *value) \
    { \
        return query_ulonglong(__func__, device, FIELD_##field, value); \
    }

#define TEXT_QUERY(symbol, member) \
    nvmlReturn_t symbol(nvmlDevice_t device, char *text, unsigned size) \
    { \
        Call call = begin(__func__, device); \
        if (call.result == NVML_SUCCESS) \
            call.result = answer_text(call.device->member, text, size); \
        return close_call(&call); \
    }

/* ------------------------------------------------------------------ starting and stopping */

static nvmlReturn_t initialise(const char *function)
{
    Call call = open_call(function);
    call.result = refusal(&call, false);
    if (call.result == NVML_SUCCESS) {
        if (!is_initialised())
            initialised.users = 0;
        initialised.users++;
        initialised.pid = getpid();
    }
    return close_call(&call);
}

nvmlReturn_t nvmlInit(void)
{
    return initialise(__func__);
}

nvmlReturn_t nvmlInit_v2(void)
{
    return initialise(__func__);
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return initialise(__func__);
}

/* Works without a driver, too: a program must be able to clean up. */
nvmlReturn_t nvmlShutdown(void)
{
    Call call = open_call(__func__);
    call.result = refusal(&call, true);
    if (call.result == NVML_ERROR_DRIVER_NOT_LOADED && call.script == NULL)
        call.result = NVML_SUCCESS;
    if (call.result == NVML_SUCCESS)
        initialised.users--;
    return close_call(&call);
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "The operating system has blocked the request",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "The requested vgpu operation is not available on target device, becasue ECC is enabled",
        "Insufficient Resources",
        "Frequency Not Supported",
        "The provided version is invalid/unsupported",
        "Deprecated",
        "Not Ready",
        "GPU Not Found",
        "Invalid State",
        "Reset Type Not Supported",
    };
    return result >= 0 && (size_t)result < COUNT_OF(texts) ? texts[result] : "Unknown Error";
}

/* ------------------------------------------------------------------ the machine */

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    Call call = open_call(__func__);
    if (admit(&call))
        call.result = answer_text(call.script->driver, version, size);
    return close_call(&call);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned size)
{
    Call call = open_call(__func__);
    if (admit(&call))
        call.result = answer_text(call.script->nvml, version, size);
    return close_call(&call);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    Call call = open_call(__func__);
    if (admit(&call))
        call.result = answer_int(call.script->cuda, version);
    return close_call(&call);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    Call call = open_call(__func__);
    if (admit(&call))
        call.result = answer_int(call.script->cuda, version);
    return close_call(&call);
}

nvmlReturn_t nvmlDeviceGetCount(unsigned *count)
{
    Call call = open_call(__func__);
    if (admit(&call))
        call.result = answer_int(call.script->gpu_count, (int *)count);
    return close_call(&call);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    Call call = open_call(__func__);
    if (admit(&call))
        call.result = answer_int(call.script->gpu_count, (int *)count);
    return close_call(&call);
}

/* ------------------------------------------------------------------ finding a device */

/* Give out the handle of the device that the caller described; absent if there is none. */
static nvmlReturn_t find(Call *call, Target place, nvmlReturn_t absent, nvmlDevice_t *out)
{
    if (admit_device(call, place, absent)) {
        if (out == NULL)
            call->result = NVML_ERROR_INVALID_ARGUMENT;
        else
            *out = handle_of(place);
    }
    return close_call(call);
}

static nvmlReturn_t find_by_index(const char *function, unsigned index, nvmlDevice_t *device)
{
    Call call = open_call(function);
    Target place = index < MAX_GPUS ? (Target){(int)index, NONE} : NOWHERE;
    return find(&call, place, NVML_ERROR_INVALID_ARGUMENT, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return find_by_index(__func__, index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    return find_by_index(__func__, index, device);
}

typedef bool Matcher(const Device *device, const char *key);

static Target search(Script *script, Matcher *matches, const char *key)
{
    for (int gpu = 0; script != NULL && key != NULL && gpu < script->gpu_count; gpu++) {
        if (matches(script->gpus[gpu], key))
            return script->gpus[gpu]->place;
        for (int mig = 0; mig < MAX_MIGS; mig++) {
            const Device *device = script->gpus[gpu]->migs[mig];
            if (device != NULL && matches(device, key))
                return device->place;
        }
    }
    return NOWHERE;
}

static bool has_uuid(const Device *device, const char *uuid)
{
    return strcasecmp(device->uuid, uuid) == 0;
}

static bool has_serial(const Device *device, const char *serial)
{
    return strcmp(device->serial, serial) == 0;
}

static bool parse_bus_id(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
    return sscanf(text, "%x:%x:%x", domain, bus, device) == 3;
}

/* The domain has 4 or 8 digits, depending on who wrote it. */
static bool has_bus_id(const Device *device, const char *bus_id)
{
    unsigned one[3], two[3];
    return parse_bus_id(device->bus_id, &one[0], &one[1], &one[2]) &&
           parse_bus_id(bus_id, &two[0], &two[1], &two[2]) && memcmp(one, two, sizeof one) == 0;
}

static nvmlReturn_t find_by_key(const char *function, Matcher *matches, const char *key,
                                nvmlDevice_t *device)
{
    Call call = open_call(function);
    nvmlReturn_t absent = key == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
    return find(&call, search(call.script, matches, key), absent, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    return find_by_key(__func__, has_uuid, uuid, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    return find_by_key(__func__, has_serial, serial, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return find_by_key(__func__, has_bus_id, bus_id, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    return find_by_key(__func__, has_bus_id, bus_id, device);
}

/* ------------------------------------------------------------------ what a device is */

TEXT_QUERY(nvmlDeviceGetName, name)
TEXT_QUERY(nvmlDeviceGetUUID, uuid)
TEXT_QUERY(nvmlDeviceGetSerial, serial)
TEXT_QUERY(nvmlDeviceGetVbiosVersion, vbios)
UINT_QUERY(nvmlDeviceGetMinorNumber, minor_number)
UINT_QUERY(nvmlDeviceGetArchitecture, architecture)
UINT_QUERY(nvmlDeviceGetNumGpuCores, cuda_cores)
TWO_UINTS_QUERY(nvmlDeviceGetCudaComputeCapability, compute_capability_major,
                compute_capability_minor)

/* Of a MIG device: its index in its GPU. */
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS) {
        if (index == NULL)
            call.result = NVML_ERROR_INVALID_ARGUMENT;
        else
            *index = (unsigned)(call.place.mig < 0 ? call.place.gpu : call.place.mig);
    }
    return close_call(&call);
}

/* Versions 1 and 2 have no second bus id; their struct is shorter. */
static nvmlReturn_t answer_pci(const Device *device, int version, nvmlPciInfo_t *info)
{
    unsigned domain, bus, slot;
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!parse_bus_id(device->bus_id, &domain, &bus, &slot))
        return NVML_ERROR_NOT_SUPPORTED;
    info->domain = domain;
    info->bus = bus;
    info->device = slot;
    info->pciDeviceId = 0x20B210DE; /* A100-SXM4-80GB */
    info->pciSubSystemId = 0x147F10DE;
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%04X:%02X:%02X.0", domain & 0xffff,
             bus & 0xff, slot & 0xff);
    if (version == 3)
        snprintf(info->busId, sizeof info->busId, "%08X:%02X:%02X.0", domain, bus, slot);
    return NVML_SUCCESS;
}

#define PCI_QUERY(symbol, version) \
    nvmlReturn_t symbol(nvmlDevice_t device, nvmlPciInfo_t *info) \
    { \
        Call call = begin(__func__, device); \
        if (call.result == NVML_SUCCESS) \
            call.result = answer_pci(call.device, version, info); \
        return close_call(&call); \
    }

PCI_QUERY(nvmlDeviceGetPciInfo, 1)
PCI_QUERY(nvmlDeviceGetPciInfo_v2, 2)
PCI_QUERY(nvmlDeviceGetPciInfo_v3, 3)

/* ------------------------------------------------------------------ memory */

typedef struct {
    uint64_t total, used, reserved;
} MemoryState;

static nvmlReturn_t read_memory(const Call *call, MemoryState *memory)
{
    nvmlReturn_t result = read_number(call, FIELD_total_bytes, &memory->total);
    if (result == NVML_SUCCESS)
        result = read_number(call, FIELD_used_bytes, &memory->used);
    if (result == NVML_SUCCESS)
        result = read_number(call, FIELD_reserved_bytes, &memory->reserved);
    return result;
}

static uint64_t free_memory(const MemoryState *memory)
{
    uint64_t taken = memory->used + memory->reserved;
    return taken < memory->total ? memory->total - taken : 0;
}

/* Version 1 has no word for what the driver keeps for itself and counts it as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    MemoryState state;
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : read_memory(&call, &state);
    if (call.result == NVML_SUCCESS) {
        memory->total = state.total;
        memory->free = free_memory(&state);
        memory->used = state.used + state.reserved;
    }
    return close_call(&call);
}

static nvmlReturn_t check_version(const unsigned *version, unsigned expected)
{
    if (version == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    return *version == expected ? NVML_SUCCESS : NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    MemoryState state;
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = check_version((unsigned *)memory, STRUCT_VERSION(nvmlMemory_v2_t, 2));
    if (call.result == NVML_SUCCESS)
        call.result = read_memory(&call, &state);
    if (call.result == NVML_SUCCESS) {
        memory->total = state.total;
        memory->reserved = state.reserved;
        memory->free = free_memory(&state);
        memory->used = state.used;
    }
    return close_call(&call);
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    uint64_t total, used;
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS && memory == NULL)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result == NVML_SUCCESS)
        call.result = read_number(&call, FIELD_bar1_total_bytes, &total);
    if (call.result == NVML_SUCCESS)
        call.result = read_number(&call, FIELD_bar1_used_bytes, &used);
    if (call.result == NVML_SUCCESS)
        *memory = (nvmlBAR1Memory_t){total, total - used, used};
    return close_call(&call);
}

nvmlReturn_t nvmlDeviceGetConfComputeMemSizeInfo(nvmlDevice_t device,
                                                 nvmlConfComputeMemSizeInfo_t *info)
{
    uint64_t total;
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = info == NULL ? NVML_ERROR_INVALID_ARGUMENT
                                   : read_number(&call, FIELD_total_bytes, &total);
    if (call.result == NVML_SUCCESS)
        *info = (nvmlConfComputeMemSizeInfo_t){0, total / 1024};
    return close_call(&call);
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result =
            check_version((unsigned *)mode, STRUCT_VERSION(nvmlDeviceAddressingMode_t, 1));
    if (call.result == NVML_SUCCESS)
        call.result = answer_uint(&call, FIELD_addressing_mode, &mode->value);
    return close_call(&call);
}

/* ------------------------------------------------------------------ activity */

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS && rates == NULL)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result == NVML_SUCCESS)
        call.result = answer_uint(&call, FIELD_util, &rates->gpu);
    if (call.result == NVML_SUCCESS)
        call.result = answer_uint(&call, FIELD_mem_util, &rates->memory);
    return close_call(&call);
}

#define CODER_QUERY(symbol, field) \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned *percent, unsigned *period_us) \
    { \
        Call call = begin(__func__, device); \
        if (call.result == NVML_SUCCESS && period_us == NULL) \
            call.result = NVML_ERROR_INVALID_ARGUMENT; \
        if (call.result == NVML_SUCCESS) \
            call.result = answer_uint(&call, FIELD_##field, percent); \
        if (call.result == NVML_SUCCESS) \
            *period_us = (unsigned)call.script->sample_period_us; \
        return close_call(&call); \
    }

CODER_QUERY(nvmlDeviceGetEncoderUtilization, encoder_util)
CODER_QUERY(nvmlDeviceGetDecoderUtilization, decoder_util)

/* ------------------------------------------------------------------ heat, power, clocks */

UINT_QUERY(nvmlDeviceGetFanSpeed, fan)
UINT_QUERY(nvmlDeviceGetNumFans, num_fans)
UINT_QUERY(nvmlDeviceGetPowerUsage, power_mw)
UINT_QUERY(nvmlDeviceGetPowerManagementLimit, power_limit_mw)
UINT_QUERY(nvmlDeviceGetPowerManagementDefaultLimit, default_power_limit_mw)
UINT_QUERY(nvmlDeviceGetEnforcedPowerLimit, enforced_power_limit_mw)
TWO_UINTS_QUERY(nvmlDeviceGetPowerManagementLimitConstraints, min_power_limit_mw,
                max_power_limit_mw)
ULONGLONG_QUERY(nvmlDeviceGetTotalEnergyConsumption, energy_mj)
UINT_QUERY(nvmlDeviceGetPerformanceState, performance_state)
UINT_QUERY(nvmlDeviceGetPowerState, performance_state)
ULONGLONG_QUERY(nvmlDeviceGetCurrentClocksEventReasons, event_reasons)
ULONGLONG_QUERY(nvmlDeviceGetCurrentClocksThrottleReasons, event_reasons)
ULONGLONG_QUERY(nvmlDeviceGetSupportedClocksEventReasons, supported_event_reasons)
ULONGLONG_QUERY(nvmlDeviceGetSupportedClocksThrottleReasons, supported_event_reasons)

/* All fans of a GPU turn at the same speed. */
nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *speed)
{
    (void)fan;
    return query_uint(__func__, device, FIELD_fan, speed);
}

/* The only sensor that NVML knows is that of the chip, number 0. */
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *degrees)
{
    static const FieldId sensors[] = {FIELD_temperature};
    return query_choice(__func__, device, sensors, COUNT_OF(sensors), sensor, degrees);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result =
            check_version((unsigned *)temperature, STRUCT_VERSION(nvmlTemperature_t, 1));
    if (call.result == NVML_SUCCESS && temperature->sensorType != 0)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result == NVML_SUCCESS)
        call.result =
            answer_uint(&call, FIELD_temperature, (unsigned *)&temperature->temperature);
    return close_call(&call);
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned threshold,
                                               unsigned *degrees)
{
    static const FieldId thresholds[] = {FIELD_shutdown_temperature, FIELD_slowdown_temperature,
                                         FIELD_max_memory_temperature, FIELD_max_temperature};
    return query_choice(__func__, device, thresholds, COUNT_OF(thresholds), threshold, degrees);
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    static const FieldId clocks[] = {FIELD_graphics_clock, FIELD_sm_clock, FIELD_memory_clock,
                                     FIELD_video_clock};
    return query_choice(__func__, device, clocks, COUNT_OF(clocks), type, mhz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    static const FieldId clocks[] = {FIELD_max_graphics_clock, FIELD_max_sm_clock,
                                     FIELD_max_memory_clock, FIELD_max_video_clock};
    return query_choice(__func__, device, clocks, COUNT_OF(clocks), type, mhz);
}

/* ------------------------------------------------------------------ state and PCIe */

UINT_QUERY(nvmlDeviceGetComputeMode, compute_mode)
UINT_QUERY(nvmlDeviceGetPersistenceMode, persistence)
UINT_QUERY(nvmlDeviceGetDisplayActive, display_active)
UINT_QUERY(nvmlDeviceGetDisplayMode, display_mode)
TWO_UINTS_QUERY(nvmlDeviceGetDriverModel, driver_model, driver_model)
TWO_UINTS_QUERY(nvmlDeviceGetDriverModel_v2, driver_model, driver_model)
TWO_UINTS_QUERY(nvmlDeviceGetEccMode, ecc_mode, ecc_mode)
UINT_QUERY(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
UINT_QUERY(nvmlDeviceGetMaxPcieLinkGeneration, max_pcie_generation)
UINT_QUERY(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
UINT_QUERY(nvmlDeviceGetMaxPcieLinkWidth, max_pcie_width)
UINT_QUERY(nvmlDeviceGetPcieReplayCounter, pcie_replays)

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *kb_s)
{
    static const FieldId counters[] = {FIELD_pcie_tx_kb_s, FIELD_pcie_rx_kb_s};
    return query_choice(__func__, device, counters, COUNT_OF(counters), counter, kb_s);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                         unsigned long long *count)
{
    (void)counter; /* volatile or aggregate: the machine has never been rebooted */
    FieldId field = type == 0 ? FIELD_ecc_corrected : FIELD_ecc_uncorrected;
    return query_ulonglong(__func__, device, field, count);
}

/* ------------------------------------------------------------------ time stamps */

/*
 * NVML stamps samples with microseconds since 1970. The difference to the monotonic clock of the
 * series is taken once, so that the same sample has the same stamp in every call.
 */
static int64_t realtime_offset_ns(void)
{
    static int64_t offset;
    if (offset == 0) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        offset = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - monotonic_ns();
    }
    return offset;
}

static uint64_t now_us(void)
{
    return (uint64_t)(monotonic_ns() + realtime_offset_ns()) / 1000;
}

/* The stamp of the newest sample: the driver takes one in each period. */
static uint64_t newest_sample_us(const Script *script)
{
    return now_us() / script->sample_period_us * script->sample_period_us;
}

/* ------------------------------------------------------------------ samples and field values */

/* A sample is the mean over its period, as in the driver, so that short bursts are not lost. */
static uint64_t sample_at(const Call *call, FieldId field, uint64_t stamp_us)
{
    int64_t end = (int64_t)stamp_us * 1000 - realtime_offset_ns();
    int64_t start = end - (int64_t)call->script->sample_period_us * 1000;
    return number_mean(call->script, call->device, field, start, end);
}

/* Oldest first; only those newer than last_seen. */
static nvmlReturn_t answer_samples(const Call *call, FieldId field, uint64_t last_seen,
                                   unsigned *count, nvmlSample_t *samples)
{
    uint64_t period = call->script->sample_period_us;
    uint64_t newest = newest_sample_us(call->script);
    unsigned filled = 0;
    for (size_t age = call->script->sample_depth; age-- > 0 && filled < *count;) {
        uint64_t stamp = newest - age * period;
        uint64_t value = stamp > last_seen ? sample_at(call, field, stamp) : NOT_AVAILABLE;
        if (value == NOT_AVAILABLE)
            continue;
        samples[filled].timeStamp = stamp;
        samples[filled++].sampleValue = (nvmlValue_t){.ullVal = (unsigned)value};
    }
    *count = filled;
    return filled > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned type, unsigned long long last_seen,
                                  unsigned *value_type, unsigned *count, nvmlSample_t *samples)
{
    static const FieldId fields[] = {FIELD_power_mw,     FIELD_util,         FIELD_mem_util,
                                     FIELD_encoder_util, FIELD_decoder_util, FIELD_sm_clock,
                                     FIELD_memory_clock};
    Call call = begin(__func__, device);
    if (call.result != NVML_SUCCESS)
        return close_call(&call);
    if (type >= COUNT_OF(fields) || value_type == NULL || count == NULL) {
        call.result = NVML_ERROR_INVALID_ARGUMENT;
        return close_call(&call);
    }
    *value_type = VALUE_UNSIGNED_INT;
    if (number_now(call.script, call.device, fields[type]) == NOT_AVAILABLE)
        call.result = NVML_ERROR_NOT_SUPPORTED;
    else if (samples == NULL)
        *count = (unsigned)call.script->sample_depth;
    else
        call.result = answer_samples(&call, fields[type], last_seen, count, samples);
    return close_call(&call);
}

static void answer_field_value(const Call *call, nvmlFieldValue_t *out)
{
    static const struct {
        unsigned id, type;
        FieldId field;
    } known[] = {
        {82, VALUE_UNSIGNED_INT, FIELD_memory_temperature},
        {83, VALUE_UNSIGNED_LONG_LONG, FIELD_energy_mj},
        {185, VALUE_UNSIGNED_INT, FIELD_power_mw}, /* mean of the last second */
        {186, VALUE_UNSIGNED_INT, FIELD_power_mw}, /* this moment */
        {197, VALUE_UNSIGNED_LONG_LONG, FIELD_pcie_tx_bytes},
        {198, VALUE_UNSIGNED_LONG_LONG, FIELD_pcie_rx_bytes},
    };
    out->timestamp = (long long)now_us();
    out->latencyUsec = 1;
    out->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    for (size_t index = 0; index < COUNT_OF(known); index++) {
        if (known[index].id != out->fieldId)
            continue;
        uint64_t value;
        out->nvmlReturn = read_number(call, known[index].field, &value);
        out->valueType = known[index].type;
        out->value.ullVal = out->nvmlReturn == NVML_SUCCESS ? value : 0;
    }
}

/* The call itself succeeds; each value has its own result. */
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS && (values == NULL || count < 1))
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    for (int index = 0; call.result == NVML_SUCCESS && index < count; index++)
        answer_field_value(&call, &values[index]);
    return close_call(&call);
}

/* ------------------------------------------------------------------ GPM */

/* nvmlGpmSample_t: the caller allocates it here, has it filled, and compares two of them. */
typedef struct {
    Target place;
    int64_t at_ns; /* 0: not filled yet */
} *nvmlGpmSample_t;

typedef struct {
    unsigned metricId;
    nvmlReturn_t nvmlReturn;
    double value;
    struct {
        char *shortName, *longName, *unit;
    } metricInfo;
} nvmlGpmMetric_t;

/* metrics has room for far more; only numMetrics of them are touched. */
typedef struct {
    unsigned version, numMetrics;
    nvmlGpmSample_t sample1, sample2;
    nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;

typedef struct {
    unsigned version, isSupportedDevice;
} nvmlGpmSupport_t;

enum { GPM_VERSION = 1, HOPPER = 9 };

static bool has_gpm(const Call *call)
{
    uint64_t architecture = number_now(call->script, call->device, FIELD_architecture);
    return architecture != NOT_AVAILABLE && architecture >= HOPPER;
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS && support == NULL)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    else if (call.result == NVML_SUCCESS && support->version != GPM_VERSION)
        call.result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (call.result == NVML_SUCCESS)
        support->isSupportedDevice = has_gpm(&call);
    return close_call(&call);
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
    Call call = open_call(__func__);
    if (admit(&call) && sample == NULL)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result == NVML_SUCCESS)
        *sample = calloc(1, sizeof **sample);
    return close_call(&call);
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    Call call = open_call(__func__);
    if (admit(&call))
        free(sample);
    return close_call(&call);
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS && !has_gpm(&call))
        call.result = NVML_ERROR_NOT_SUPPORTED;
    if (call.result == NVML_SUCCESS && sample == NULL)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result == NVML_SUCCESS) {
        sample->place = call.place;
        sample->at_ns = monotonic_ns();
    }
    return close_call(&call);
}

/* A metric is the mean between its two samples. */
static void answer_metric(const Call *call, const nvmlGpmMetricsGet_t *get, nvmlGpmMetric_t *metric)
{
    static const struct {
        unsigned id;
        FieldId field;
    } known[] = {{2, FIELD_sm_active}, {10, FIELD_dram_active}};
    metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    for (size_t index = 0; index < COUNT_OF(known); index++) {
        if (known[index].id != metric->metricId)
            continue;
        uint64_t value = number_mean(call->script, call->device, known[index].field,
                                     get->sample1->at_ns, get->sample2->at_ns);
        if (value == NOT_AVAILABLE)
            return;
        metric->value = (double)value;
        metric->nvmlReturn = NVML_SUCCESS;
    }
}

static bool are_two_of_one(const nvmlGpmMetricsGet_t *get)
{
    return get->sample1 != NULL && get->sample2 != NULL && get->sample1->at_ns != 0 &&
           get->sample2->at_ns > get->sample1->at_ns &&
           get->sample1->place.gpu == get->sample2->place.gpu;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    Call call = open_call(__func__);
    if (get == NULL || !are_two_of_one(get))
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    else if (get->version != GPM_VERSION)
        call.result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    else
        admit_device(&call, get->sample2->place, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned index = 0; call.result == NVML_SUCCESS && index < get->numMetrics; index++)
        answer_metric(&call, get, &get->metrics[index]);
    return close_call(&call);
}

/* ------------------------------------------------------------------ processes */

/* The processes of a MIG device are those of its GPU that have its instance ids. */
static bool is_on(const Process *process, const Device *device)
{
    return device->parent == NULL || (process->gi == device->numbers[FIELD_gi].value &&
                                      process->ci == device->numbers[FIELD_ci].value);
}

/* The next process on the device from *index on, or NULL. kind KIND_COUNT: of any kind. */
static const Process *next_process(const Device *device, int kind, size_t *index)
{
    const Device *gpu = device->parent != NULL ? device->parent : device;
    while (*index < gpu->process_count) {
        const Process *process = &gpu->processes[(*index)++];
        if ((kind == KIND_COUNT || (process->kinds & 1u << kind) != 0) && is_on(process, device))
            return process;
    }
    return NULL;
}

static unsigned count_processes(const Device *device, int kind)
{
    unsigned count = 0;
    for (size_t index = 0; next_process(device, kind, &index) != NULL;)
        count++;
    return count;
}

/*
 * How many processes a caller with a buffer finds. Usually those of the script. If the script
 * has a "grow" rule, more have started since the caller was told the size, by whatever call.
 */
static unsigned processes_at_fetch(Call *call, int kind, unsigned count)
{
    unsigned told = call->device->told[kind];
    call->device->told[kind] = 0;
    if (told == 0)
        return count;
    const Rule *rule = rule_for_call(&call->script->growth, call->function, call->place);
    return rule != NULL ? told + (unsigned)rule->value : count;
}

/* Decide on the number of processes: tell the size, or return true to have them written. */
static bool size_processes(Call *call, int kind, bool has_buffer, unsigned *count)
{
    unsigned capacity = has_buffer ? *count : 0;
    unsigned present = count_processes(call->device, kind);
    if (capacity > 0)
        present = processes_at_fetch(call, kind, present);
    *count = present;
    if (present <= capacity)
        return true;
    call->device->told[kind] = present;
    call->result = NVML_ERROR_INSUFFICIENT_SIZE;
    return false;
}

/* A process that started between two calls. */
static Process newcomer(unsigned number)
{
    return (Process){.pid = 900000 + number, .used = MIB, .gi = UINT32_MAX, .ci = UINT32_MAX};
}

/* Layout of all strides: pid, 4 bytes of padding, memory; from 24: gi, ci; 32: protected memory. */
static void write_process(unsigned char *entry, size_t stride, bool padding, const Process *process)
{
    const uint64_t protected_memory = 0;
    memcpy(entry, &process->pid, 4);
    if (padding)
        memset(entry + 4, 0, 4);
    memcpy(entry + 8, &process->used, 8);
    if (stride < 24)
        return;
    memcpy(entry + 16, &process->gi, 4);
    memcpy(entry + 20, &process->ci, 4);
    if (stride >= 32)
        memcpy(entry + 24, &protected_memory, 8);
}

static void write_processes(const Call *call, int kind, size_t stride, bool padding, unsigned count,
                            unsigned char *entries)
{
    size_t index = 0;
    for (unsigned number = 0; number < count; number++) {
        const Process *process = next_process(call->device, kind, &index);
        Process extra = newcomer(number);
        write_process(entries + number * stride, stride, padding,
                      process != NULL ? process : &extra);
    }
}

/* Not more than 24 bytes per slot: a caller that does not know the stride of 32 has no more. */
static void clear_slots(const Script *script, size_t stride, unsigned slots, void *entries)
{
    if (script->process_clear)
        memset(entries, 0, slots * (stride < 24 ? stride : 24));
}

/* version is that of the function; 3 has the stride of the script. */
static nvmlReturn_t list_processes(const char *function, nvmlDevice_t device, int kind,
                                   int version, unsigned *count, void *entries)
{
    Call call = begin(function, device);
    if (call.result == NVML_SUCCESS && count == NULL)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result != NVML_SUCCESS)
        return close_call(&call);
    const Script *script = call.script;
    size_t stride = version == 3 ? script->process_stride : version == 2 ? 24 : 16;
    unsigned slots = *count;
    if (size_processes(&call, kind, entries != NULL, count) && entries != NULL) {
        clear_slots(script, stride, slots, entries);
        write_processes(&call, kind, stride, script->process_padding, *count, entries);
    }
    return close_call(&call);
}

#define PROCESS_QUERY(symbol, kind, version) \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned *count, void *entries) \
    { \
        return list_processes(__func__, device, kind, version, count, entries); \
    }

PROCESS_QUERY(nvmlDeviceGetComputeRunningProcesses, KIND_COMPUTE, 1)
PROCESS_QUERY(nvmlDeviceGetComputeRunningProcesses_v2, KIND_COMPUTE, 2)
PROCESS_QUERY(nvmlDeviceGetComputeRunningProcesses_v3, KIND_COMPUTE, 3)
PROCESS_QUERY(nvmlDeviceGetGraphicsRunningProcesses, KIND_GRAPHICS, 1)
PROCESS_QUERY(nvmlDeviceGetGraphicsRunningProcesses_v2, KIND_GRAPHICS, 2)
PROCESS_QUERY(nvmlDeviceGetGraphicsRunningProcesses_v3, KIND_GRAPHICS, 3)
PROCESS_QUERY(nvmlDeviceGetMPSComputeRunningProcesses, KIND_MPS, 1)
PROCESS_QUERY(nvmlDeviceGetMPSComputeRunningProcesses_v2, KIND_MPS, 2)
PROCESS_QUERY(nvmlDeviceGetMPSComputeRunningProcesses_v3, KIND_MPS, 3)

/* The list whose entries have a layout that is sure: always 32 bytes. */
nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
                                                   nvmlProcessDetailList_t *list)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = check_version((unsigned *)list, STRUCT_VERSION(nvmlProcessDetailList_t, 1));
    if (call.result == NVML_SUCCESS && list->mode >= KIND_COUNT)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result != NVML_SUCCESS)
        return close_call(&call);
    bool has_buffer = list->procArray != NULL;
    int kind = (int)list->mode;
    if (size_processes(&call, kind, has_buffer, &list->numProcArrayEntries) && has_buffer)
        write_processes(&call, kind, sizeof *list->procArray, true, list->numProcArrayEntries,
                        (unsigned char *)list->procArray);
    return close_call(&call);
}

/* ------------------------------------------------------------------ activity of processes */

static bool has_utilisation(const Process *process)
{
    return process->kinds != 0 && process->sm != NOT_AVAILABLE;
}

static unsigned count_utilisation(const Device *device)
{
    unsigned count = 0;
    const Process *process;
    for (size_t index = 0; (process = next_process(device, KIND_COUNT, &index)) != NULL;)
        count += has_utilisation(process);
    return count;
}

static void write_utilisation(const Call *call, nvmlProcessUtilizationSample_t *samples)
{
    uint64_t stamp = newest_sample_us(call->script);
    const Process *process;
    for (size_t index = 0; (process = next_process(call->device, KIND_COUNT, &index)) != NULL;) {
        if (!has_utilisation(process))
            continue;
        *samples++ = (nvmlProcessUtilizationSample_t){
            process->pid,           stamp,
            (unsigned)process->sm,  (unsigned)process->mem,
            (unsigned)process->enc, (unsigned)process->dec,
        };
    }
}

static nvmlReturn_t answer_utilisation(const Call *call, nvmlProcessUtilizationSample_t *samples,
                                       unsigned *count, uint64_t last_seen)
{
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (call->script->gpus[call->place.gpu]->numbers[FIELD_mig_mode].value == 1)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned present = count_utilisation(call->device);
    unsigned capacity = samples != NULL ? *count : 0;
    *count = present;
    if (present == 0 || newest_sample_us(call->script) <= last_seen)
        return NVML_ERROR_NOT_FOUND;
    if (present > capacity)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    write_utilisation(call, samples);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                             nvmlProcessUtilizationSample_t *samples,
                                             unsigned *count, unsigned long long last_seen)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = answer_utilisation(&call, samples, count, last_seen);
    return close_call(&call);
}

/* ------------------------------------------------------------------ accounting */

UINT_QUERY(nvmlDeviceGetAccountingMode, accounting_mode)
UINT_QUERY(nvmlDeviceGetAccountingBufferSize, accounting_buffer)

static nvmlReturn_t check_accounting(const Call *call)
{
    unsigned enabled = 0;
    nvmlReturn_t result = answer_uint(call, FIELD_accounting_mode, &enabled);
    return result == NVML_SUCCESS && !enabled ? NVML_ERROR_NOT_SUPPORTED : result;
}

static nvmlReturn_t answer_accounting(const Call *call, unsigned pid, nvmlAccountingStats_t *stats)
{
    const Process *process;
    if (stats == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (size_t index = 0; (process = next_process(call->device, KIND_COUNT, &index)) != NULL;) {
        if (process->pid != pid)
            continue;
        *stats = (nvmlAccountingStats_t){
            .gpuUtilization = process->sm != NOT_AVAILABLE ? (unsigned)process->sm : 0,
            .memoryUtilization = (unsigned)process->mem,
            .maxMemoryUsage = process->peak,
            .time = process->kinds != 0 ? 0 : process->time_ms, /* known at the end only */
            .isRunning = process->kinds != 0,
        };
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid,
                                          nvmlAccountingStats_t *stats)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = check_accounting(&call);
    if (call.result == NVML_SUCCESS)
        call.result = answer_accounting(&call, pid, stats);
    return close_call(&call);
}

static nvmlReturn_t answer_accounting_pids(const Call *call, unsigned *count, unsigned *pids)
{
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned capacity = pids != NULL ? *count : 0;
    *count = count_processes(call->device, KIND_COUNT);
    if (*count > capacity)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    const Process *process;
    for (size_t index = 0; (process = next_process(call->device, KIND_COUNT, &index)) != NULL;)
        *pids++ = process->pid;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned *count, unsigned *pids)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = check_accounting(&call);
    if (call.result == NVML_SUCCESS)
        call.result = answer_accounting_pids(&call, count, pids);
    return close_call(&call);
}

/* ------------------------------------------------------------------ MIG */

TWO_UINTS_QUERY(nvmlDeviceGetMigMode, mig_mode, mig_pending)
UINT_QUERY(nvmlDeviceGetMaxMigDeviceCount, max_mig_devices)
UINT_QUERY(nvmlDeviceGetGpuInstanceId, gi)
UINT_QUERY(nvmlDeviceGetComputeInstanceId, ci)

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS && is_mig == NULL)
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result == NVML_SUCCESS)
        *is_mig = call.place.mig >= 0;
    return close_call(&call);
}

static nvmlReturn_t answer_mig_handle(const Call *call, unsigned index, nvmlDevice_t *mig)
{
    if (call->place.mig >= 0 || mig == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t limit;
    nvmlReturn_t result = read_number(call, FIELD_max_mig_devices, &limit);
    if (result != NVML_SUCCESS)
        return result;
    if (index >= limit)
        return NVML_ERROR_INVALID_ARGUMENT;
    Target place = {call->place.gpu, (int)index};
    if (script_device(call->script, place) == NULL)
        return NVML_ERROR_NOT_FOUND;
    *mig = handle_of(place);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index,
                                                 nvmlDevice_t *mig)
{
    Call call = begin(__func__, device);
    if (call.result == NVML_SUCCESS)
        call.result = answer_mig_handle(&call, index, mig);
    return close_call(&call);
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    Call call = begin(__func__, mig);
    if (call.result == NVML_SUCCESS && (call.place.mig < 0 || device == NULL))
        call.result = NVML_ERROR_INVALID_ARGUMENT;
    if (call.result == NVML_SUCCESS)
        *device = handle_of((Target){call.place.gpu, NONE});
    return close_call(&call);
}

/* A count that the script does not give is 0. */
static unsigned count_of(const Call *call, FieldId field)
{
    uint64_t value = number_now(call->script, call->device, field);
    return value == NOT_AVAILABLE ? 0 : (unsigned)value;
}

static nvmlReturn_t answer_attributes(const Call *call, nvmlDeviceAttributes_t *attributes)
{
    uint64_t total;
    if (attributes == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (call->place.mig < 0)
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t result = read_number(call, FIELD_total_bytes, &total);
    if (result != NVML_SUCCESS)
        return result;
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = count_of(call, FIELD_sm_count),
        .sharedCopyEngineCount = count_of(call, FIELD_copy_engines),
        .sharedDecoderCount = count_of(call, FIELD_decoders),
        .sharedEncoderCount = count_of(call, FIELD_encoders),
        .sharedJpegCount = count_of(call, FIELD_jpeg_engines),
        .sharedOfaCount = count_of(call, FIELD_ofa_engines),
        .gpuInstanceSliceCount = count_of(call, FIELD_gi_slices),
        .computeInstanceSliceCount = count_of(call, FIELD_ci_slices),
        .memorySizeMB = total / MIB,
    };
    return NVML_SUCCESS;
}

#define ATTRIBUTES_QUERY(symbol) \
    nvmlReturn_t symbol(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) \
    { \
        Call call = begin(__func__, device); \
        if (call.result == NVML_SUCCESS) \
            call.result = answer_attributes(&call, attributes); \
        return close_call(&call); \
    }

ATTRIBUTES_QUERY(nvmlDeviceGetAttributes)
ATTRIBUTES_QUERY(nvmlDeviceGetAttributes_v2)
