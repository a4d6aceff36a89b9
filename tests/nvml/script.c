/*
 * Reads the script of the test machine and answers questions about it. See script.h for the
 * data and machine.py for the grammar.
 */
#define _GNU_SOURCE
#include "script.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------------------ errors of the script */

typedef struct {
    const char *path;
    unsigned line;
    Script *script;
    Device *gpu;    /* the section we are in; NULL before the first "gpu" */
    Device *device; /* the same, or a MIG device of it */
    char *rest;     /* what is left of the line */
} Parser;

/* A test with a wrong script must fail loudly, whatever the code under test catches. */
__attribute__((noreturn, format(printf, 2, 3))) static void die(const Parser *parser,
                                                                const char *format, ...)
{
    va_list arguments;
    fprintf(stderr, "oomph test machine: %s:%u: ", parser->path, parser->line);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

static void *checked(void *memory)
{
    if (memory == NULL)
        abort();
    return memory;
}

/* ------------------------------------------------------------------ words and numbers */

/* The next word of the line, or NULL at its end. */
static char *next_word(Parser *parser)
{
    char *word = parser->rest + strspn(parser->rest, " \t");
    if (*word == '\0')
        return NULL;
    parser->rest = word + strcspn(word, " \t");
    if (*parser->rest != '\0')
        *parser->rest++ = '\0';
    return word;
}

static char *need_word(Parser *parser, const char *what)
{
    char *word = next_word(parser);
    if (word == NULL)
        die(parser, "%s is missing", what);
    return word;
}

static void need_end(Parser *parser)
{
    char *word = next_word(parser);
    if (word != NULL)
        die(parser, "unexpected \"%s\"", word);
}

/* All that is left of the line, without the blanks around it. */
static void copy_rest(Parser *parser, char *text)
{
    char *start = parser->rest + strspn(parser->rest, " \t");
    size_t length = strlen(start);
    if (length == 0)
        die(parser, "a text is missing");
    if (length >= TEXT_SIZE)
        die(parser, "text longer than %d bytes", TEXT_SIZE - 1);
    memcpy(text, start, length + 1);
    parser->rest = start + length;
}

static uint64_t to_number(const Parser *parser, const char *word)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(word, &end, 0);
    if (end == word || *end != '\0' || errno != 0 || *word == '-')
        die(parser, "\"%s\" is not a number", word);
    return value;
}

static uint64_t to_number_or_na(const Parser *parser, const char *word)
{
    return strcmp(word, "NA") == 0 ? NOT_AVAILABLE : to_number(parser, word);
}

static long to_small_number(const Parser *parser, const char *word)
{
    uint64_t value = to_number(parser, word);
    if (value > INT_MAX)
        die(parser, "%s is too large", word);
    return (long)value;
}

static bool to_switch(const Parser *parser, const char *word)
{
    if (strcmp(word, "on") != 0 && strcmp(word, "off") != 0)
        die(parser, "\"%s\" is neither on nor off", word);
    return strcmp(word, "on") == 0;
}

static FieldId to_field(const Parser *parser, const char *word)
{
#define X(name, value) #name,
    static const char *const names[FIELD_COUNT] = {NUMBER_FIELDS(X)};
#undef X
    for (int field = 0; field < FIELD_COUNT; field++)
        if (strcmp(word, names[field]) == 0)
            return (FieldId)field;
    die(parser, "\"%s\" is neither a keyword nor a field", word);
}

/* "*", "3" (GPU 3 and its MIG devices) or "3:1" (MIG device 1 of GPU 3) */
static Target to_target(const Parser *parser, char *word)
{
    Target target = {ANY, ANY};
    if (strcmp(word, "*") == 0)
        return target;
    char *colon = strchr(word, ':');
    if (colon != NULL) {
        *colon = '\0';
        target.mig = (int)to_small_number(parser, colon + 1);
    }
    target.gpu = (int)to_small_number(parser, word);
    return target;
}

/* The value of "key=value" if the word is that option, else NULL. */
static char *option(char *word, const char *key)
{
    size_t length = strlen(key);
    return strncmp(word, key, length) == 0 && word[length] == '=' ? word + length + 1 : NULL;
}

/* ------------------------------------------------------------------ devices */

static Device *new_device(Target place)
{
    Device *device = checked(calloc(1, sizeof *device));
    device->place = place;
#define X(name, initial) device->numbers[FIELD_##name].value = (initial);
    NUMBER_FIELDS(X)
#undef X
    return device;
}

static Device *new_gpu(int index)
{
    Device *gpu = new_device((Target){index, NONE});
    strcpy(gpu->name, "NVIDIA A100-SXM4-80GB");
    snprintf(gpu->uuid, TEXT_SIZE, "GPU-%08x-0000-4000-8000-%012x", index, index);
    snprintf(gpu->bus_id, TEXT_SIZE, "00000000:%02X:00.0", index + 1);
    snprintf(gpu->serial, TEXT_SIZE, "16505%08d", index);
    strcpy(gpu->vbios, "92.00.45.00.03");
    return gpu;
}

/* A MIG device knows its memory and what it is; every other query is "not supported". */
static Device *new_mig(Device *parent, int index)
{
    Device *mig = new_device((Target){parent->place.gpu, index});
    for (int field = 0; field < FIELD_COUNT; field++)
        mig->numbers[field].value = NOT_AVAILABLE;
    mig->numbers[FIELD_total_bytes].value = 10 * GIB;
    mig->numbers[FIELD_used_bytes].value = 0;
    mig->numbers[FIELD_reserved_bytes].value = 0;
    mig->numbers[FIELD_gi].value = (uint64_t)index + 1;
    mig->numbers[FIELD_ci].value = 0;
    mig->numbers[FIELD_gi_slices].value = 1;
    mig->numbers[FIELD_ci_slices].value = 1;
    mig->numbers[FIELD_sm_count].value = 14;
    mig->parent = parent;
    snprintf(mig->uuid, TEXT_SIZE, "MIG-%08x-0000-4000-8000-%012x", parent->place.gpu, index);
    snprintf(mig->name, TEXT_SIZE, "%.60s MIG 1g.10gb", parent->name);
    strcpy(mig->bus_id, "NA");
    strcpy(mig->serial, "NA");
    strcpy(mig->vbios, "NA");
    return mig;
}

static void free_device(Device *device)
{
    if (device == NULL)
        return;
    for (int index = 0; index < MAX_MIGS; index++)
        free_device(device->migs[index]);
    for (int field = 0; field < FIELD_COUNT; field++) {
        Series *series = device->numbers[field].series;
        if (series != NULL)
            free(series->values);
        free(series);
    }
    free(device->processes);
    free(device);
}

Device *script_device(Script *script, Target place)
{
    if (place.gpu < 0 || place.gpu >= script->gpu_count)
        return NULL;
    Device *gpu = script->gpus[place.gpu];
    if (place.mig < 0)
        return gpu;
    return place.mig < MAX_MIGS ? gpu->migs[place.mig] : NULL;
}

static void add_process(Device *gpu, Process process)
{
    size_t size = (gpu->process_count + 1) * sizeof process;
    gpu->processes = checked(realloc(gpu->processes, size));
    gpu->processes[gpu->process_count++] = process;
}

/* ------------------------------------------------------------------ lines about one device */

static void read_gpu(Parser *parser)
{
    Script *script = parser->script;
    if (to_small_number(parser, need_word(parser, "the index")) != script->gpu_count)
        die(parser, "the next GPU is gpu %d", script->gpu_count);
    if (script->gpu_count == MAX_GPUS)
        die(parser, "more than %d GPUs", MAX_GPUS);
    parser->gpu = parser->device = new_gpu(script->gpu_count);
    script->cuda_order[script->gpu_count] = script->gpu_count;
    script->gpus[script->gpu_count++] = parser->gpu;
}

static void read_mig(Parser *parser)
{
    if (parser->gpu == NULL)
        die(parser, "mig before the first gpu");
    long index = to_small_number(parser, need_word(parser, "the index"));
    if (index >= MAX_MIGS)
        die(parser, "MIG devices are 0 to %d", MAX_MIGS - 1);
    if (parser->gpu->migs[index] != NULL)
        die(parser, "mig %ld is there twice", index);
    parser->device = parser->gpu->migs[index] = new_mig(parser->gpu, (int)index);
}

static unsigned to_kinds(const Parser *parser, const char *letters)
{
    unsigned kinds = 0;
    if (strcmp(letters, "-") == 0)
        return kinds;
    for (const char *letter = letters; *letter != '\0'; letter++) {
        const char *known = strchr("CGM", *letter);
        if (known == NULL)
            die(parser, "the kind of a process has the letters C, G and M, or is -");
        kinds |= 1u << (known - "CGM");
    }
    return kinds;
}

static void read_process_option(Parser *parser, Process *process, char *word)
{
    char *value;
    if ((value = option(word, "used")) != NULL)
        process->used = to_number_or_na(parser, value);
    else if ((value = option(word, "kind")) != NULL)
        process->kinds = to_kinds(parser, value);
    else if ((value = option(word, "gi")) != NULL)
        process->gi = (uint32_t)to_number(parser, value);
    else if ((value = option(word, "ci")) != NULL)
        process->ci = (uint32_t)to_number(parser, value);
    else if ((value = option(word, "sm")) != NULL)
        process->sm = to_number_or_na(parser, value);
    else if ((value = option(word, "mem")) != NULL)
        process->mem = to_number(parser, value);
    else if ((value = option(word, "enc")) != NULL)
        process->enc = to_number(parser, value);
    else if ((value = option(word, "dec")) != NULL)
        process->dec = to_number(parser, value);
    else if ((value = option(word, "peak")) != NULL)
        process->peak = to_number_or_na(parser, value);
    else if ((value = option(word, "time_ms")) != NULL)
        process->time_ms = to_number(parser, value);
    else
        die(parser, "a process has no option \"%s\"", word);
}

static void read_process(Parser *parser)
{
    if (parser->gpu == NULL)
        die(parser, "process before the first gpu");
    Process process = {
        .used = GIB,
        .kinds = 1u << KIND_COMPUTE,
        .gi = UINT32_MAX,
        .ci = UINT32_MAX,
        .sm = NOT_AVAILABLE,
        .peak = UNSET,
    };
    if (parser->device != parser->gpu) {
        process.gi = (uint32_t)parser->device->numbers[FIELD_gi].value;
        process.ci = (uint32_t)parser->device->numbers[FIELD_ci].value;
    }
    process.pid = (uint32_t)to_number(parser, need_word(parser, "the pid"));
    for (char *word; (word = next_word(parser)) != NULL;)
        read_process_option(parser, &process, word);
    if (process.peak == UNSET)
        process.peak = process.used;
    add_process(parser->gpu, process);
}

static char *text_field(Device *device, const char *keyword)
{
    if (strcmp(keyword, "name") == 0)
        return device->name;
    if (strcmp(keyword, "uuid") == 0)
        return device->uuid;
    if (strcmp(keyword, "bus_id") == 0)
        return device->bus_id;
    if (strcmp(keyword, "serial") == 0)
        return device->serial;
    return strcmp(keyword, "vbios") == 0 ? device->vbios : NULL;
}

static void read_field(Parser *parser, const char *keyword)
{
    char *text = parser->device != NULL ? text_field(parser->device, keyword) : NULL;
    if (text != NULL) {
        copy_rest(parser, text);
        return;
    }
    FieldId field = to_field(parser, keyword);
    if (parser->device == NULL)
        die(parser, "%s before the first gpu", keyword);
    parser->device->numbers[field].value = to_number_or_na(parser, need_word(parser, "the value"));
}

/* ------------------------------------------------------------------ lines about the machine */

static void read_driver(Parser *parser)
{
    copy_rest(parser, parser->script->driver);
}

static void read_nvml(Parser *parser)
{
    copy_rest(parser, parser->script->nvml);
}

static void read_cuda(Parser *parser)
{
    parser->script->cuda = (int)to_small_number(parser, need_word(parser, "the version"));
}

/* Negative is before the computer was started: that is when its monotonic clock was 0. */
static void read_epoch(Parser *parser)
{
    char *word = need_word(parser, "the time");
    bool negative = *word == '-';
    int64_t time = (int64_t)to_number(parser, word + negative);
    parser->script->epoch_ns = negative ? -time : time;
}

static void read_process_stride(Parser *parser)
{
    long stride = to_small_number(parser, need_word(parser, "the stride"));
    if (stride != 16 && stride != 24 && stride != 32)
        die(parser, "the stride of a process is 16, 24 or 32");
    parser->script->process_stride = (size_t)stride;
}

static void read_process_padding(Parser *parser)
{
    parser->script->process_padding = to_switch(parser, need_word(parser, "on or off"));
}

static void read_process_clear(Parser *parser)
{
    parser->script->process_clear = to_switch(parser, need_word(parser, "on or off"));
}

static void read_samples(Parser *parser)
{
    for (char *word, *value; (word = next_word(parser)) != NULL;) {
        if ((value = option(word, "period_ms")) != NULL && to_small_number(parser, value) > 0)
            parser->script->sample_period_us = 1000 * to_number(parser, value);
        else if ((value = option(word, "depth")) != NULL)
            parser->script->sample_depth = (size_t)to_small_number(parser, value);
        else
            die(parser, "samples has no option \"%s\"", word);
    }
}

static void read_lost(Parser *parser)
{
    long index = to_small_number(parser, need_word(parser, "the index"));
    if (index >= parser->script->gpu_count)
        die(parser, "there is no gpu %ld above this line", index);
    parser->script->gpus[index]->lost = true;
}

static void read_cuda_order(Parser *parser)
{
    bool seen[MAX_GPUS] = {false};
    for (int place = 0; place < parser->script->gpu_count; place++) {
        long index = to_small_number(parser, need_word(parser, "the index of a GPU"));
        if (index >= parser->script->gpu_count || seen[index])
            die(parser, "cuda_order names each GPU above this line once");
        seen[index] = true;
        parser->script->cuda_order[place] = (int)index;
    }
}

/* The device that "gpu=" of a series or rate names: exactly one, and above this line. */
static Device *to_device(Parser *parser, char *word)
{
    Device *device = script_device(parser->script, to_target(parser, word));
    if (device == NULL)
        die(parser, "there is no such device above this line");
    return device;
}

static void read_values(const Parser *parser, Series *series, char *list)
{
    for (char *word; (word = strsep(&list, ",")) != NULL;) {
        size_t size = (series->count + 1) * sizeof *series->values;
        series->values = checked(realloc(series->values, size));
        series->values[series->count++] = to_number_or_na(parser, word);
    }
}

static void read_series(Parser *parser)
{
    Device *device = NULL;
    int field = FIELD_COUNT;
    Series *series = checked(calloc(1, sizeof *series));
    for (char *word, *value; (word = next_word(parser)) != NULL;) {
        if ((value = option(word, "gpu")) != NULL)
            device = to_device(parser, value);
        else if ((value = option(word, "field")) != NULL)
            field = to_field(parser, value);
        else if ((value = option(word, "step_ms")) != NULL)
            series->step_ns = 1000000 * to_number(parser, value);
        else if ((value = option(word, "hold")) != NULL)
            series->hold = to_switch(parser, value);
        else if ((value = option(word, "values")) != NULL && series->count == 0)
            read_values(parser, series, value);
        else
            die(parser, "a series has no option \"%s\"", word);
    }
    if (device == NULL || field == FIELD_COUNT || series->step_ns == 0 || series->count == 0)
        die(parser, "a series needs gpu=, field=, step_ms= and values=");
    if (device->numbers[field].series != NULL)
        die(parser, "this field has a series already");
    device->numbers[field].series = series;
}

static void read_rate(Parser *parser)
{
    Device *device = NULL;
    int field = FIELD_COUNT;
    uint64_t per_second = 0;
    for (char *word, *value; (word = next_word(parser)) != NULL;) {
        if ((value = option(word, "gpu")) != NULL)
            device = to_device(parser, value);
        else if ((value = option(word, "field")) != NULL)
            field = to_field(parser, value);
        else if ((value = option(word, "per_second")) != NULL)
            per_second = to_number(parser, value);
        else
            die(parser, "a rate has no option \"%s\"", word);
    }
    if (device == NULL || field == FIELD_COUNT || per_second == 0)
        die(parser, "a rate needs gpu=, field= and per_second=");
    device->numbers[field].per_second = (double)per_second;
}

/* ------------------------------------------------------------------ rules */

static void add_rule(Rules *rules, Rule rule)
{
    rules->rules = checked(realloc(rules->rules, (rules->count + 1) * sizeof rule));
    rules->rules[rules->count++] = rule;
}

static Rule new_rule(Parser *parser, const char *function)
{
    Rule rule = {.target = {ANY, ANY}, .value = -1, .times = -1};
    if (strlen(function) >= TEXT_SIZE)
        die(parser, "\"%s\" is too long", function);
    strcpy(rule.function, function);
    return rule;
}

/* The options of a rule; value_key is the one that every such rule needs. */
static void read_rule_options(Parser *parser, Rule *rule, const char *value_key)
{
    for (char *word, *value; (word = next_word(parser)) != NULL;) {
        if ((value = option(word, value_key)) != NULL)
            rule->value = to_small_number(parser, value);
        else if ((value = option(word, "gpu")) != NULL)
            rule->target = to_target(parser, value);
        else if ((value = option(word, "after")) != NULL)
            rule->after = to_small_number(parser, value);
        else if ((value = option(word, "times")) != NULL)
            rule->times = to_small_number(parser, value);
        else
            die(parser, "no option \"%s\" here", word);
    }
    if (rule->value < 0)
        die(parser, "%s= is missing", value_key);
}

static void read_error(Parser *parser)
{
    Rule rule = new_rule(parser, need_word(parser, "the function"));
    read_rule_options(parser, &rule, "code");
    add_rule(&parser->script->errors, rule);
}

static void read_latency(Parser *parser)
{
    Rule rule = new_rule(parser, need_word(parser, "the function"));
    read_rule_options(parser, &rule, "us");
    add_rule(&parser->script->latencies, rule);
}

static void read_grow(Parser *parser)
{
    Rule rule = new_rule(parser, "*");
    read_rule_options(parser, &rule, "by");
    add_rule(&parser->script->growth, rule);
}

static void read_missing(Parser *parser)
{
    add_rule(&parser->script->missing, new_rule(parser, need_word(parser, "the function")));
}

static void read_cuda_error(Parser *parser)
{
    Rule rule = new_rule(parser, need_word(parser, "the function"));
    rule.value = to_small_number(parser, need_word(parser, "the code"));
    add_rule(&parser->script->cuda_errors, rule);
}

static bool is_function(const char *pattern, const char *function)
{
    if (strpbrk(pattern, "*?[") == NULL)
        return strcmp(pattern, function) == 0;
    return fnmatch(pattern, function, 0) == 0;
}

static bool is_target(Target target, Target place)
{
    return (target.gpu == ANY || target.gpu == place.gpu) &&
           (target.mig == ANY || target.mig == place.mig);
}

Rule *rule_for_call(Rules *rules, const char *function, Target place)
{
    for (Rule *rule = rules->rules; rule < rules->rules + rules->count; rule++) {
        if (!is_target(rule->target, place) || !is_function(rule->function, function))
            continue;
        long call = rule->passed++;
        if (call >= rule->after && (rule->times < 0 || call < rule->after + rule->times))
            return rule;
    }
    return NULL;
}

/* ------------------------------------------------------------------ the whole script */

static const struct {
    const char *keyword;
    void (*read)(Parser *);
} keywords[] = {
    {"gpu", read_gpu},
    {"mig", read_mig},
    {"process", read_process},
    {"driver", read_driver},
    {"nvml", read_nvml},
    {"cuda", read_cuda},
    {"epoch", read_epoch},
    {"process_stride", read_process_stride},
    {"process_padding", read_process_padding},
    {"process_clear", read_process_clear},
    {"samples", read_samples},
    {"series", read_series},
    {"rate", read_rate},
    {"error", read_error},
    {"latency", read_latency},
    {"grow", read_grow},
    {"missing", read_missing},
    {"lost", read_lost},
    {"cuda_order", read_cuda_order},
    {"cuda_error", read_cuda_error},
};

/* Cut a comment: a '#' at the start of a word. And the blanks before it. */
static void cut_comment(char *line)
{
    char *end = line;
    while (*end != '\0' && !(*end == '#' && (end == line || strchr(" \t", end[-1]) != NULL)))
        end++;
    while (end > line && strchr(" \t\r", end[-1]) != NULL)
        end--;
    *end = '\0';
}

static void read_line(Parser *parser)
{
    cut_comment(parser->rest);
    char *keyword = next_word(parser);
    if (keyword == NULL)
        return;
    for (size_t index = 0; index < sizeof keywords / sizeof *keywords; index++) {
        if (strcmp(keyword, keywords[index].keyword) == 0) {
            keywords[index].read(parser);
            need_end(parser);
            return;
        }
    }
    read_field(parser, keyword);
    need_end(parser);
}

static void settle(Number *number, uint64_t value)
{
    if (number->value == UNSET)
        number->value = value;
}

static void settle_mig_mode(Device *gpu)
{
    Number *numbers = gpu->numbers;
    bool has_migs = false;
    for (int index = 0; index < MAX_MIGS; index++)
        has_migs = has_migs || gpu->migs[index] != NULL;
    settle(&numbers[FIELD_mig_mode], has_migs);
    settle(&numbers[FIELD_mig_pending], numbers[FIELD_mig_mode].value);
    bool enabled = numbers[FIELD_mig_mode].value == 1;
    settle(&numbers[FIELD_max_mig_devices], enabled ? 7 : 0);
    if (!enabled)
        return;
    /* NVML does not attribute activity when a GPU is shared by MIG devices. */
    static const FieldId activity[] = {FIELD_util, FIELD_mem_util, FIELD_encoder_util,
                                       FIELD_decoder_util};
    for (size_t index = 0; index < sizeof activity / sizeof *activity; index++) {
        numbers[activity[index]].value = NOT_AVAILABLE;
        if (numbers[activity[index]].series != NULL)
            numbers[activity[index]].series->count = 0;
    }
}

/* Fill in what the script left open and what follows from other lines. */
static void settle_gpu(Device *gpu)
{
    Number *numbers = gpu->numbers;
    uint64_t limit = numbers[FIELD_power_limit_mw].value;
    settle(&numbers[FIELD_enforced_power_limit_mw], limit);
    settle(&numbers[FIELD_default_power_limit_mw], limit);
    settle(&numbers[FIELD_max_power_limit_mw], limit);
    settle(&numbers[FIELD_minor_number], (uint64_t)gpu->place.gpu);
    settle(&numbers[FIELD_sm_clock], numbers[FIELD_graphics_clock].value);
    settle(&numbers[FIELD_max_sm_clock], numbers[FIELD_max_graphics_clock].value);
    settle_mig_mode(gpu);
    static const FieldId inherited[] = {FIELD_compute_capability_major,
                                        FIELD_compute_capability_minor, FIELD_architecture};
    for (int mig = 0; mig < MAX_MIGS; mig++)
        for (size_t index = 0; gpu->migs[mig] != NULL && index < 3; index++)
            gpu->migs[mig]->numbers[inherited[index]].value = numbers[inherited[index]].value;
}

static Script *parse(const char *path, char *text)
{
    Script *script = checked(calloc(1, sizeof *script));
    strcpy(script->driver, "550.54.15");
    strcpy(script->nvml, "12.550.54.15");
    script->cuda = 12040;
    script->process_stride = 24;
    script->process_padding = true;
    script->sample_period_us = 167000;
    script->sample_depth = 100;
    script->epoch_ns = monotonic_ns();
    Parser parser = {.path = path, .script = script};
    while ((parser.rest = strsep(&text, "\n")) != NULL) {
        parser.line++;
        read_line(&parser);
    }
    for (int index = 0; index < script->gpu_count; index++)
        settle_gpu(script->gpus[index]);
    return script;
}

static void free_script(Script *script)
{
    if (script == NULL)
        return;
    for (int index = 0; index < script->gpu_count; index++)
        free_device(script->gpus[index]);
    free(script->errors.rules);
    free(script->cuda_errors.rules);
    free(script->latencies.rules);
    free(script->missing.rules);
    free(script->growth.rules);
    free(script);
}

/* ------------------------------------------------------------------ loading and reloading */

static struct {
    Script *script;
    char path[PATH_MAX];
    struct stat stat;
} loaded;

static bool is_loaded(const char *path, const struct stat *now)
{
    const struct stat *then = &loaded.stat;
    return loaded.script != NULL && now->st_mtim.tv_nsec == then->st_mtim.tv_nsec &&
           now->st_mtim.tv_sec == then->st_mtim.tv_sec && now->st_size == then->st_size &&
           now->st_ino == then->st_ino && now->st_dev == then->st_dev &&
           strcmp(path, loaded.path) == 0;
}

static char *read_file(int file, size_t size)
{
    char *text = checked(malloc(size + 1));
    size_t done = 0;
    while (done < size) {
        ssize_t got = read(file, text + done, size - done);
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    text[done] = '\0';
    return text;
}

/* The stat is that of the open file, so a replacement in between is seen by the next call. */
static bool load(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    fstat(file, &loaded.stat);
    char *text = read_file(file, (size_t)loaded.stat.st_size);
    close(file);
    free_script(loaded.script);
    snprintf(loaded.path, sizeof loaded.path, "%s", path);
    loaded.script = parse(path, text);
    free(text);
    return true;
}

Script *script_now(void)
{
    const char *path = getenv("OOMPH_NVML_SCRIPT");
    struct stat now;
    if (path == NULL || *path == '\0' || stat(path, &now) != 0)
        return NULL;
    if (!is_loaded(path, &now) && !load(path))
        return NULL;
    return loaded.script;
}

/* ------------------------------------------------------------------ the lock */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void script_lock(void)
{
    pthread_mutex_lock(&lock);
}

void script_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

/* A fork while another thread is in a call must not leave the child with a held lock. */
__attribute__((constructor)) static void prepare_for_forks(void)
{
    pthread_atfork(script_lock, script_unlock, script_unlock);
}

/* ------------------------------------------------------------------ values over time */

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t series_value(const Series *series, uint64_t step)
{
    if (series->count == 0)
        return NOT_AVAILABLE;
    if (step >= series->count)
        step = series->hold ? series->count - 1 : step % series->count;
    return series->values[step];
}

static uint64_t number_at(const Number *number, uint64_t elapsed_ns)
{
    uint64_t value = number->value;
    if (number->series != NULL)
        value = series_value(number->series, elapsed_ns / number->series->step_ns);
    if (value == NOT_AVAILABLE)
        return value;
    return value + (uint64_t)(number->per_second * 1e-9 * (double)elapsed_ns);
}

/* Before the start everything has its first value. */
static uint64_t elapsed_ns(const Script *script, int64_t now_ns)
{
    return now_ns > script->epoch_ns ? (uint64_t)(now_ns - script->epoch_ns) : 0;
}

uint64_t number_now(const Script *script, const Device *device, FieldId field)
{
    const Number *number = &device->numbers[field];
    if (number->series == NULL && number->per_second == 0)
        return number->value;
    return number_at(number, elapsed_ns(script, monotonic_ns()));
}

/* The mean of a series, step by step; NA steps do not count. */
static uint64_t series_mean(const Series *series, uint64_t from, uint64_t to)
{
    double sum = 0, weight = 0;
    for (uint64_t end; from < to; from = end) {
        end = (from / series->step_ns + 1) * series->step_ns;
        if (end > to)
            end = to;
        uint64_t value = series_value(series, from / series->step_ns);
        if (value == NOT_AVAILABLE)
            continue;
        sum += (double)value * (double)(end - from);
        weight += (double)(end - from);
    }
    return weight > 0 ? (uint64_t)(sum / weight + 0.5) : NOT_AVAILABLE;
}

uint64_t number_mean(const Script *script, const Device *device, FieldId field, int64_t from_ns,
                     int64_t to_ns)
{
    const Number *number = &device->numbers[field];
    uint64_t from = elapsed_ns(script, from_ns), to = elapsed_ns(script, to_ns);
    if (number->series == NULL || from >= to)
        return number_at(number, to);
    return series_mean(number->series, from, to);
}

/* ------------------------------------------------------------------ the call log */

static void format_place(Target place, char *text, size_t size)
{
    if (place.gpu < 0)
        snprintf(text, size, "-");
    else if (place.mig < 0)
        snprintf(text, size, "%d", place.gpu);
    else
        snprintf(text, size, "%d:%d", place.gpu, place.mig);
}

/* Opened anew each time: a kept descriptor could be closed by the program (a daemon does that)
 * and then be another file. One write, so that processes can share the log. */
void log_call(const char *function, Target place, int result)
{
    const char *path = getenv("OOMPH_NVML_LOG");
    if (path == NULL || *path == '\0')
        return;
    char where[32], line[256];
    format_place(place, where, sizeof where);
    int length =
        snprintf(line, sizeof line, "%d %s %s %d\n", (int)getpid(), function, where, result);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0)
        return;
    if (write(file, line, (size_t)length) != length)
        abort();
    close(file);
}
