/*
 * The script of the test machine: a text file that says what the fake driver reports.
 *
 * This is shared by the two libraries of the test machine, libnvidia-ml.so.1 (nvml.c) and
 * libcuda.so.1 (cuda.c). Each has its own copy of script.c and of its state, which is why
 * everything here is hidden: were it exported, the first library loaded would serve both.
 *
 * The path of the script is in the environment variable OOMPH_NVML_SCRIPT. It is looked up,
 * and the file is checked for a change, at each call of the fake driver.
 */
#ifndef OOMPH_SCRIPT_H
#define OOMPH_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

enum { MAX_GPUS = 64, MAX_MIGS = 8, TEXT_SIZE = 96 };

/* "NA" in the script. NVML's own NVML_VALUE_NOT_AVAILABLE for a process is the same number. */
#define NOT_AVAILABLE UINT64_MAX
/* The script does not say: the value follows from another field (see settle_gpu). */
#define UNSET (UINT64_MAX - 1)

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

/* Every number a GPU or a MIG device can have: name in the script, value if it is not there. */
#define NUMBER_FIELDS(X) \
    /* memory */ \
    X(total_bytes, 80 * GIB) \
    X(used_bytes, 0) \
    X(reserved_bytes, 600 * MIB) \
    X(bar1_total_bytes, 128 * GIB) \
    X(bar1_used_bytes, MIB) \
    /* activity, in percent */ \
    X(util, 0) \
    X(mem_util, 0) \
    X(encoder_util, 0) \
    X(decoder_util, 0) \
    /* what GPM counts, in percent: of architecture 9 (Hopper) and later */ \
    X(sm_active, 0) \
    X(dram_active, 0) \
    /* heat and power */ \
    X(temperature, 40) \
    X(memory_temperature, NOT_AVAILABLE) \
    X(slowdown_temperature, 89) \
    X(shutdown_temperature, 92) \
    X(max_temperature, 85) \
    X(max_memory_temperature, 95) \
    X(fan, NOT_AVAILABLE) \
    X(num_fans, 0) \
    X(power_mw, 60000) \
    X(power_limit_mw, 400000) \
    X(enforced_power_limit_mw, UNSET) \
    X(default_power_limit_mw, UNSET) \
    X(min_power_limit_mw, 100000) \
    X(max_power_limit_mw, UNSET) \
    X(energy_mj, 0) \
    /* state */ \
    X(performance_state, 0) \
    X(compute_mode, 0) \
    X(persistence, 1) \
    X(display_active, 0) \
    X(display_mode, 0) \
    X(driver_model, NOT_AVAILABLE) \
    X(event_reasons, 0) \
    X(supported_event_reasons, 0x1ff) \
    X(accounting_mode, 0) \
    X(accounting_buffer, 4000) \
    X(addressing_mode, 0) \
    X(ecc_mode, 1) \
    X(ecc_corrected, 0) \
    X(ecc_uncorrected, 0) \
    /* what it is */ \
    X(minor_number, UNSET) \
    X(compute_capability_major, 8) \
    X(compute_capability_minor, 0) \
    X(architecture, 7) \
    X(cuda_cores, 6912) \
    /* PCIe */ \
    X(pcie_generation, 4) \
    X(max_pcie_generation, 4) \
    X(pcie_width, 16) \
    X(max_pcie_width, 16) \
    X(pcie_tx_kb_s, 0) \
    X(pcie_rx_kb_s, 0) \
    X(pcie_tx_bytes, 0) \
    X(pcie_rx_bytes, 0) \
    X(pcie_replays, 0) \
    /* clocks, in MHz */ \
    X(graphics_clock, 1410) \
    X(sm_clock, UNSET) \
    X(memory_clock, 1593) \
    X(video_clock, 1275) \
    X(max_graphics_clock, 1410) \
    X(max_sm_clock, UNSET) \
    X(max_memory_clock, 1593) \
    X(max_video_clock, 1290) \
    /* MIG: of the GPU */ \
    X(mig_mode, UNSET) \
    X(mig_pending, UNSET) \
    X(max_mig_devices, UNSET) \
    /* MIG: of the MIG device */ \
    X(gi, NOT_AVAILABLE) \
    X(ci, NOT_AVAILABLE) \
    X(gi_slices, NOT_AVAILABLE) \
    X(ci_slices, NOT_AVAILABLE) \
    X(sm_count, NOT_AVAILABLE) \
    X(copy_engines, NOT_AVAILABLE) \
    X(encoders, NOT_AVAILABLE) \
    X(decoders, NOT_AVAILABLE) \
    X(jpeg_engines, NOT_AVAILABLE) \
    X(ofa_engines, NOT_AVAILABLE)

#define X(name, value) FIELD_##name,
typedef enum { NUMBER_FIELDS(X) FIELD_COUNT } FieldId;
#undef X

/* Which device a rule is about, or which device a call is about. */
typedef struct {
    int gpu; /* ANY in a rule: all of them; NONE in a call: the call is about no device */
    int mig; /* ANY in a rule: the GPU and its MIG devices; NONE in a call: the GPU itself */
} Target;

enum { ANY = -1, NONE = -2 };

/* Values that a field takes one after the other, each for step_ns. */
typedef struct {
    uint64_t step_ns;
    bool hold; /* stay at the last value instead of starting again */
    size_t count;
    uint64_t *values;
} Series;

typedef struct {
    uint64_t value;
    double per_second; /* growth of a counter */
    Series *series;    /* NULL: constant */
} Number;

enum { KIND_COMPUTE, KIND_GRAPHICS, KIND_MPS, KIND_COUNT };

typedef struct {
    uint32_t pid;
    uint64_t used;  /* NOT_AVAILABLE as on WSL */
    unsigned kinds; /* bit set of 1 << KIND_x; none: it has ended, only accounting knows it */
    uint32_t gi, ci;
    uint64_t sm, mem, enc, dec; /* utilisation sample; sm NOT_AVAILABLE: has no sample */
    uint64_t peak;              /* accounting: highest memory use */
    uint64_t time_ms;           /* accounting: time it ran */
} Process;

typedef struct Device Device;
struct Device {
    Target place;
    char name[TEXT_SIZE], uuid[TEXT_SIZE], bus_id[TEXT_SIZE], serial[TEXT_SIZE], vbios[TEXT_SIZE];
    Number numbers[FIELD_COUNT];
    bool lost;
    Device *parent; /* of a MIG device */
    Device *migs[MAX_MIGS];
    Process *processes; /* on the GPU, also those of its MIG devices; a MIG device has none */
    size_t process_count;
    unsigned told[KIND_COUNT]; /* size of the process list that a caller was told last, 0: none */
};

/* What is common to the rules "error", "latency", "missing", "cuda_error" and "grow". */
typedef struct {
    char function[TEXT_SIZE]; /* a name or a shell pattern */
    Target target;
    long value;  /* error code, microseconds, processes */
    long after;  /* skip so many calls */
    long times;  /* then apply to so many; -1: to all */
    long passed; /* calls that matched so far */
} Rule;

typedef struct {
    Rule *rules;
    size_t count;
} Rules;

typedef struct {
    char driver[TEXT_SIZE], nvml[TEXT_SIZE];
    int cuda;
    size_t process_stride; /* bytes per process in the answer of the _v3 functions */
    bool process_padding;  /* write the padding bytes of a process, too */
    bool process_clear;    /* zero the caller's buffer first */
    uint64_t sample_period_us;
    size_t sample_depth;
    int64_t epoch_ns; /* CLOCK_MONOTONIC at which series and counters start */
    Device *gpus[MAX_GPUS];
    int gpu_count;
    int cuda_order[MAX_GPUS];
    Rules errors, cuda_errors, latencies, missing, growth;
} Script;

/* The script as it is now, or NULL if there is none. Only between script_lock and _unlock. */
Script *script_now(void);
void script_lock(void);
void script_unlock(void);

/* The device at that place, or NULL. */
Device *script_device(Script *script, Target place);

/* The first rule that applies to this call, or NULL. Counts the call. */
Rule *rule_for_call(Rules *rules, const char *function, Target place);

int64_t monotonic_ns(void);
/* The value of a field now, and its mean over a period; NOT_AVAILABLE if there is none. */
uint64_t number_now(const Script *script, const Device *device, FieldId field);
uint64_t number_mean(const Script *script, const Device *device, FieldId field, int64_t from_ns,
                     int64_t to_ns);

/* Append "pid function gpu result" to the file that OOMPH_NVML_LOG names, if it is set. */
void log_call(const char *function, Target place, int result);

#pragma GCC visibility pop

#endif
