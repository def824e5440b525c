/* libnvidia-ml.so.1 for machines without a GPU: answers the NVML calls that the project uses from a facts file.
 *
 * The file is $NVML_SIM_FACTS, or /etc/nvml-sim/facts.json: the topology facts of docs/architecture.md (schema 1)
 * plus the fields of README.md here. It is read again whenever NVML is initialised, so an edit acts at once.
 * A value that is null or left out is answered with NVML_ERROR_NOT_SUPPORTED, as a real card answers. */
#include <stdint.h>
#include <time.h>

#include "json.h"

#define API __attribute__((visibility("default")))
#define DEFAULT_FACTS "/etc/nvml-sim/facts.json"
#define MOST_DEVICES 64
#define MOST_LINKS 36
#define ABSENT (-1e300)

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

static const struct { int code; const char *name; const char *text; } ERRORS[] = {
    {0, "success", "Success"},
    {1, "uninitialized", "Uninitialized"},
    {2, "invalid_argument", "Invalid Argument"},
    {3, "not_supported", "Not Supported"},
    {4, "no_permission", "Insufficient Permissions"},
    {6, "not_found", "Not Found"},
    {7, "insufficient_size", "Insufficient Size"},
    {8, "insufficient_power", "Insufficient External Power"},
    {9, "driver_not_loaded", "Driver Not Loaded"},
    {10, "timeout", "Timeout"},
    {11, "irq_issue", "Interrupt Request Issue"},
    {12, "library_not_found", "NVML Shared Library Not Found"},
    {13, "function_not_found", "Function Not Found"},
    {14, "corrupted_inforom", "Corrupted infoROM"},
    {15, "gpu_is_lost", "GPU is lost"},
    {16, "reset_required", "GPU requires restart"},
    {17, "operating_system", "The operating system has blocked the request."},
    {18, "lib_rm_version_mismatch", "RM has detected an NVML/RM version mismatch."},
    {19, "in_use", "In use by another client"},
    {20, "memory", "Insufficient Memory"},
    {23, "insufficient_resources", "Insufficient Resources"},
    {25, "argument_version_mismatch", "The version of the argument is not supported"},
    {999, "unknown", "Unknown Error"},
};

struct device {
    int index; /* place in `devices`; the address of this struct is the NVML handle */
    int label; /* the facts' own index, which pairs and faults use: it stays when another entry is removed */
    const struct json *facts;
    unsigned domain, bus, slot;
};

static struct json *facts;
static struct device devices[MOST_DEVICES];
static unsigned device_count;
static unsigned initialised; /* NVML counts its initialisations */

/* ---- facts ---------------------------------------------------------------------------------------------------- */

static int error_code(const struct json *value)
{
    if (value && value->type == JSON_NUMBER)
        return (int)value->number;
    for (size_t i = 0; value && value->type == JSON_STRING && i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (!strcmp(ERRORS[i].name, value->string))
            return ERRORS[i].code;
    return UNKNOWN;
}

/* Act on the faults asked for `call` (the symbol without _v2, _v3): sleep, then answer the error. */
static int faults(const char *call, const struct device *device)
{
    const struct json *list = json_get(facts, "faults");
    for (const struct json *fault = list ? list->child : NULL; fault; fault = fault->next) {
        const char *name = json_string(fault, "call");
        double gpu = json_number(fault, "gpu", ABSENT);
        if (!name || (strcmp(name, "*") && strcmp(name, call)))
            continue;
        if (gpu != ABSENT && (!device || (int)gpu != device->label))
            continue;
        double seconds = json_number(fault, "hang_s", 0);
        if (seconds > 0) {
            struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
            while (nanosleep(&pause, &pause) != 0)
                ;
        }
        if (json_get(fault, "error"))
            return error_code(json_get(fault, "error"));
    }
    return OK;
}

/* What every call starts with. */
static int enter(const char *call)
{
    return initialised ? faults(call, NULL) : UNINITIALIZED;
}

static int enter_device(const char *call, const struct device *device)
{
    if (!initialised)
        return UNINITIALIZED;
    uintptr_t offset = (uintptr_t)device - (uintptr_t)devices;
    if ((uintptr_t)device < (uintptr_t)devices || offset % sizeof *devices || offset / sizeof *devices >= device_count)
        return INVALID_ARGUMENT;
    int code = faults(call, device);
    if (code)
        return code;
    const char *health = json_string(device->facts, "health");
    /* the bus address is known to the driver before it talks to the card */
    if (health && !strcmp(health, "lost") && strcmp(call, "nvmlDeviceGetPciInfo") && strcmp(call, "nvmlDeviceGetIndex"))
        return GPU_IS_LOST;
    return OK;
}

static int copy_text(const char *text, char *out, unsigned room)
{
    if (!out)
        return INVALID_ARGUMENT;
    if (!text)
        return NOT_SUPPORTED;
    if (strlen(text) + 1 > room)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

static int device_text(const char *call, const struct device *device, const char *key, char *out, unsigned room)
{
    int code = enter_device(call, device);
    return code ? code : copy_text(json_string(device->facts, key), out, room);
}

/* Answer an unsigned number from the device's facts, or from its object `group`; `otherwise` ABSENT: not supported. */
static int device_number(const char *call, const struct device *device, const char *group, const char *key,
                         double otherwise, unsigned *out)
{
    int code = enter_device(call, device);
    if (code)
        return code;
    if (!out)
        return INVALID_ARGUMENT;
    double value = json_number(group ? json_get(device->facts, group) : device->facts, key, otherwise);
    if (value == ABSENT)
        return NOT_SUPPORTED;
    *out = (unsigned)value;
    return OK;
}

static const struct json *find_pair(const struct device *one, const struct device *other)
{
    const struct json *list = json_get(facts, "pairs");
    for (const struct json *pair = list ? list->child : NULL; pair; pair = pair->next) {
        const struct json *gpus = json_get(pair, "gpus");
        if (!gpus || !gpus->child || !gpus->child->next)
            continue;
        int a = (int)gpus->child->number, b = (int)gpus->child->next->number;
        if ((a == one->label && b == other->label) || (a == other->label && b == one->label))
            return pair;
    }
    return NULL;
}

/* The card at the other end of a link: its index, or -1 for a link that is down, or -2 for a link it does not have.
 * Links are numbered pair by pair in the order of the peers. */
static int link_peer(const struct device *device, unsigned link)
{
    unsigned first = 0;
    for (int peer = 0; peer < (int)device_count; peer++) {
        unsigned lanes = (unsigned)json_number(find_pair(device, &devices[peer]), "nvlink_lanes", 0);
        if (peer != device->index && link < first + lanes)
            return peer;
        first += peer != device->index ? lanes : 0;
    }
    return link < (unsigned)json_number(device->facts, "nvlink_links", 0) ? -1 : -2;
}

static int fabric(void)
{
    return json_number(facts, "nvlink_fabric", 0) != 0;
}

/* ---- life cycle ----------------------------------------------------------------------------------------------- */

static int load(void)
{
    const char *path = getenv("NVML_SIM_FACTS");
    struct json *fresh = json_load(path && *path ? path : DEFAULT_FACTS);
    json_free(facts);
    facts = fresh;
    device_count = 0;
    if (!facts)
        return DRIVER_NOT_LOADED;
    int code = faults("nvmlInit", NULL);
    if (code)
        return code;
    const struct json *driver = json_get(facts, "driver");
    const char *loaded = json_string(driver, "loaded"), *userland = json_string(driver, "userland");
    if (!loaded || !json_get(facts, "gpus"))
        return DRIVER_NOT_LOADED;
    if (userland && strcmp(loaded, userland))
        return LIB_RM_VERSION_MISMATCH;
    for (const struct json *gpu = json_get(facts, "gpus")->child; gpu && device_count < MOST_DEVICES; gpu = gpu->next) {
        struct device *device = &devices[device_count];
        const char *bus_id = json_string(gpu, "bus_id");
        memset(device, 0, sizeof *device);
        device->index = (int)device_count;
        device->facts = gpu;
        device->label = (int)json_number(gpu, "index", device->index);
        if (bus_id && sscanf(bus_id, "%x:%x:%x", &device->domain, &device->bus, &device->slot) != 3)
            fprintf(stderr, "nvml_sim: bus_id %s is not like 0000:01:00.0\n", bus_id);
        device_count++;
    }
    return OK;
}

API int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    if (!initialised) {
        int code = load();
        if (code)
            return code;
    }
    initialised++;
    return OK;
}

API int nvmlInit(void) { return nvmlInitWithFlags(0); }
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void)
{
    if (!initialised)
        return UNINITIALIZED;
    initialised--;
    return OK;
}

API const char *nvmlErrorString(int code)
{
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code)
            return ERRORS[i].text;
    return "Unknown Error";
}

/* ---- the system ----------------------------------------------------------------------------------------------- */

API int nvmlSystemGetDriverVersion(char *out, unsigned room)
{
    int code = enter("nvmlSystemGetDriverVersion");
    return code ? code : copy_text(json_string(json_get(facts, "driver"), "loaded"), out, room);
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned room)
{
    char text[96];
    int code = enter("nvmlSystemGetNVMLVersion");
    const struct json *driver = json_get(facts, "driver"), *cuda = json_get(driver, "cuda");
    const char *loaded = json_string(driver, "loaded");
    if (code)
        return code;
    snprintf(text, sizeof text, "%d.%s", cuda && cuda->child ? (int)cuda->child->number : 13, loaded ? loaded : "0");
    return copy_text(text, out, room);
}

API int nvmlSystemGetCudaDriverVersion(int *out)
{
    int code = enter("nvmlSystemGetCudaDriverVersion");
    const struct json *cuda = json_get(json_get(facts, "driver"), "cuda");
    if (code)
        return code;
    if (!out)
        return INVALID_ARGUMENT;
    if (!cuda || !cuda->child || !cuda->child->next)
        return NOT_SUPPORTED;
    *out = (int)cuda->child->number * 1000 + (int)cuda->child->next->number * 10;
    return OK;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

API int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned room)
{
    int code = enter("nvmlSystemGetProcessName");
    if (code)
        return code;
    for (unsigned i = 0; i < device_count; i++) {
        const struct json *list = json_get(devices[i].facts, "processes");
        for (const struct json *process = list ? list->child : NULL; process; process = process->next)
            if ((unsigned)json_number(process, "pid", 0) == pid)
                return copy_text(json_string(process, "name"), out, room);
    }
    return NOT_FOUND;
}

/* ---- devices -------------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetCount_v2(unsigned *out)
{
    int code = enter("nvmlDeviceGetCount");
    if (code)
        return code;
    if (!out)
        return INVALID_ARGUMENT;
    *out = device_count;
    return OK;
}

API int nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out)
{
    if (!initialised)
        return UNINITIALIZED;
    if (index >= device_count || !out)
        return INVALID_ARGUMENT;
    int code = faults("nvmlDeviceGetHandleByIndex", &devices[index]);
    if (!code)
        *out = &devices[index];
    return code;
}

API int nvmlDeviceGetHandleByIndex(unsigned index, struct device **out)
{
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out)
{
    int code = enter("nvmlDeviceGetHandleByUUID");
    if (code)
        return code;
    if (!uuid || !out)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < device_count; i++) {
        const char *have = json_string(devices[i].facts, "uuid");
        if (have && !strcmp(have, uuid)) {
            *out = &devices[i];
            return OK;
        }
    }
    return NOT_FOUND;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct device **out)
{
    unsigned domain, bus, slot;
    int code = enter("nvmlDeviceGetHandleByPciBusId");
    if (code)
        return code;
    if (!bus_id || !out || sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < device_count; i++)
        if (devices[i].domain == domain && devices[i].bus == bus && devices[i].slot == slot) {
            *out = &devices[i];
            return OK;
        }
    return NOT_FOUND;
}

API int nvmlDeviceGetName(struct device *device, char *out, unsigned room)
{
    return device_text("nvmlDeviceGetName", device, "name", out, room);
}

API int nvmlDeviceGetUUID(struct device *device, char *out, unsigned room)
{
    return device_text("nvmlDeviceGetUUID", device, "uuid", out, room);
}

API int nvmlDeviceGetVbiosVersion(struct device *device, char *out, unsigned room)
{
    return device_text("nvmlDeviceGetVbiosVersion", device, "vbios", out, room);
}

API int nvmlDeviceGetIndex(struct device *device, unsigned *out)
{
    int code = enter_device("nvmlDeviceGetIndex", device);
    if (!code)
        *out = (unsigned)device->index;
    return code;
}

API int nvmlDeviceGetMinorNumber(struct device *device, unsigned *out)
{
    int code = enter_device("nvmlDeviceGetMinorNumber", device);
    if (!code)
        *out = (unsigned)json_number(device->facts, "minor", device->index);
    return code;
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

static void fill_pci(struct pci_info *out, unsigned domain, unsigned bus, unsigned slot, unsigned device_id)
{
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff, slot & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", domain, bus & 0xff, slot & 0xff);
    out->domain = domain;
    out->bus = bus;
    out->device = slot;
    out->device_id = device_id;
}

API int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci_info *out)
{
    int code = enter_device("nvmlDeviceGetPciInfo", device);
    if (code)
        return code;
    if (!out)
        return INVALID_ARGUMENT;
    if (!json_string(device->facts, "bus_id"))
        return NOT_SUPPORTED;
    fill_pci(out, device->domain, device->bus, device->slot,
             (unsigned)json_number(device->facts, "pci_device_id", 0x220410de));
    return OK;
}

API int nvmlDeviceGetPciInfo_v2(struct device *device, struct pci_info *out)
{
    return nvmlDeviceGetPciInfo_v3(device, out);
}

/* MiB in the facts, bytes in NVML. */
static int mebibytes(const struct device *device, const char *key, unsigned long long *out)
{
    double value = json_number(device->facts, key, ABSENT);
    if (value == ABSENT)
        return NOT_SUPPORTED;
    *out = (unsigned long long)(value * 1048576.0);
    return OK;
}

static unsigned long long reserved(const struct device *device)
{
    return (unsigned long long)(json_number(device->facts, "memory_reserved_mib", 0) * 1048576.0);
}

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
#define MEMORY_V2 ((unsigned)(sizeof(struct memory_v2) | 2u << 24))

API int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *out)
{
    int code = enter_device("nvmlDeviceGetMemoryInfo", device);
    if (!code)
        code = mebibytes(device, "memory_total_mib", &out->total);
    if (!code)
        code = mebibytes(device, "memory_used_mib", &out->used);
    if (!code) { /* this version counts as used what the driver keeps for itself */
        out->used += reserved(device);
        out->free = out->total - out->used;
    }
    return code;
}

API int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *out)
{
    struct memory plain = {0, 0, 0};
    if (out && out->version != MEMORY_V2)
        return ARGUMENT_VERSION_MISMATCH;
    int code = nvmlDeviceGetMemoryInfo(device, &plain);
    if (!code) {
        out->total = plain.total;
        out->reserved = reserved(device);
        out->free = plain.free;
        out->used = plain.used - out->reserved;
    }
    return code;
}

struct bar1 { unsigned long long total, free, used; };

API int nvmlDeviceGetBAR1MemoryInfo(struct device *device, struct bar1 *out)
{
    int code = enter_device("nvmlDeviceGetBAR1MemoryInfo", device);
    if (!code)
        code = mebibytes(device, "bar1_total_mib", &out->total);
    if (!code) {
        out->used = 0;
        out->free = out->total;
    }
    return code;
}

API int nvmlDeviceGetMaxPcieLinkGeneration(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetMaxPcieLinkGeneration", device, "pcie", "gen_max", ABSENT, out);
}

API int nvmlDeviceGetGpuMaxPcieLinkGeneration(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetGpuMaxPcieLinkGeneration", device, "pcie", "gen_max", ABSENT, out);
}

API int nvmlDeviceGetCurrPcieLinkGeneration(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetCurrPcieLinkGeneration", device, "pcie", "gen_current", ABSENT, out);
}

API int nvmlDeviceGetMaxPcieLinkWidth(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetMaxPcieLinkWidth", device, "pcie", "width_max", ABSENT, out);
}

API int nvmlDeviceGetCurrPcieLinkWidth(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetCurrPcieLinkWidth", device, "pcie", "width_current", ABSENT, out);
}

API int nvmlDeviceGetPcieReplayCounter(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetPcieReplayCounter", device, "pcie", "replays", 0, out);
}

API int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor)
{
    int code = enter_device("nvmlDeviceGetCudaComputeCapability", device);
    if (code)
        return code;
    const struct json *pair = json_get(device->facts, "compute_capability");
    if (!pair || !pair->child || !pair->child->next)
        return NOT_SUPPORTED;
    *major = (int)pair->child->number;
    *minor = (int)pair->child->next->number;
    return OK;
}

API int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending)
{
    int code = device_number("nvmlDeviceGetMigMode", device, NULL, "mig", ABSENT, current);
    if (!code && pending)
        *pending = *current;
    return code;
}

API int nvmlDeviceGetDisplayActive(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetDisplayActive", device, NULL, "display", ABSENT, out);
}

API int nvmlDeviceGetDisplayMode(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetDisplayMode", device, NULL, "display", ABSENT, out);
}

API int nvmlDeviceGetPersistenceMode(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetPersistenceMode", device, NULL, "persistence", 1, out);
}

API int nvmlDeviceGetComputeMode(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetComputeMode", device, NULL, "compute_mode", 0, out);
}

API int nvmlDeviceGetPowerManagementLimit(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetPowerManagementLimit", device, "power_mw", "limit", 350000, out);
}

API int nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetEnforcedPowerLimit", device, "power_mw", "limit", 350000, out);
}

API int nvmlDeviceGetPowerManagementDefaultLimit(struct device *device, unsigned *out)
{
    return device_number("nvmlDeviceGetPowerManagementDefaultLimit", device, "power_mw", "default", 350000, out);
}

API int nvmlDeviceGetPowerManagementLimitConstraints(struct device *device, unsigned *low, unsigned *high)
{
    int code = device_number("nvmlDeviceGetPowerManagementLimitConstraints", device, "power_mw", "min", 100000, low);
    return code ? code
                : device_number("nvmlDeviceGetPowerManagementLimitConstraints", device, "power_mw", "max", 350000, high);
}

API int nvmlDeviceGetVirtualizationMode(struct device *device, unsigned *out)
{
    int code = enter_device("nvmlDeviceGetVirtualizationMode", device);
    const char *kind = json_string(json_get(facts, "host"), "virtualization");
    if (!code)
        *out = kind && !strcmp(kind, "passthrough");
    return code;
}

/* The card's own memory as a NUMA node, which only coherent platforms have. */
API int nvmlDeviceGetNumaNodeId(struct device *device, int *out)
{
    return device_number("nvmlDeviceGetNumaNodeId", device, NULL, "gpu_numa_id", ABSENT, (unsigned *)out);
}

API int nvmlDeviceGetMemoryAffinity(struct device *device, unsigned size, unsigned long *out, unsigned scope)
{
    int code = enter_device("nvmlDeviceGetMemoryAffinity", device);
    (void)scope;
    if (code)
        return code;
    if (!out || !size)
        return INVALID_ARGUMENT;
    double node = json_number(device->facts, "numa_node", ABSENT);
    if (node == ABSENT || node < 0 || node >= size * 64.0)
        return NOT_SUPPORTED;
    memset(out, 0, size * sizeof *out);
    out[(unsigned)node / 64] = 1ul << ((unsigned)node % 64);
    return OK;
}

struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };

static int processes(const char *call, struct device *device, unsigned *count, struct process *out)
{
    int code = enter_device(call, device);
    if (code)
        return code;
    if (!count)
        return INVALID_ARGUMENT;
    const struct json *list = json_get(device->facts, "processes");
    if (!list)
        return NOT_SUPPORTED;
    unsigned room = *count, needed = 0;
    for (const struct json *process = list->child; process; process = process->next)
        needed++;
    *count = needed;
    if (!needed)
        return OK;
    if (!out || room < needed)
        return INSUFFICIENT_SIZE;
    for (const struct json *process = list->child; process; process = process->next, out++) {
        double used = json_number(process, "memory_mib", ABSENT);
        out->pid = (unsigned)json_number(process, "pid", 0);
        out->memory = used == ABSENT ? ~0ull : (unsigned long long)(used * 1048576.0);
        out->gpu_instance = out->compute_instance = ~0u;
    }
    return OK;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process *out)
{
    return processes("nvmlDeviceGetComputeRunningProcesses", device, count, out);
}

API int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, unsigned *count, struct process *out)
{
    return processes("nvmlDeviceGetComputeRunningProcesses", device, count, out);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *device, unsigned *count, struct process *out)
{
    (void)out;
    int code = enter_device("nvmlDeviceGetGraphicsRunningProcesses", device);
    if (!code)
        *count = 0;
    return code;
}

/* ---- pairs and links ------------------------------------------------------------------------------------------ */

API int nvmlDeviceGetTopologyCommonAncestor(struct device *one, struct device *other, unsigned *out)
{
    static const char *const LEVELS[] = {"internal", "single", "multiple", "hostbridge", "node", "system"};
    int code = enter_device("nvmlDeviceGetTopologyCommonAncestor", one);
    if (!code)
        code = enter_device("nvmlDeviceGetTopologyCommonAncestor", other);
    if (code)
        return code;
    const char *ancestor = one == other ? "internal" : json_string(find_pair(one, other), "ancestor");
    for (unsigned i = 0; ancestor && i < sizeof LEVELS / sizeof *LEVELS; i++)
        if (!strcmp(ancestor, LEVELS[i])) {
            *out = i * 10;
            return OK;
        }
    return NOT_SUPPORTED;
}

API int nvmlDeviceGetP2PStatus(struct device *one, struct device *other, unsigned what, unsigned *out)
{
    static const char *const STATUSES[] = {"ok", "chipset_not_supported", "gpu_not_supported", "topology_not_supported",
                                           "disabled_by_regkey", "not_supported", "unknown"};
    static const char *const KEYS[] = {"p2p_read", "p2p_write", "p2p_nvlink", "p2p_atomics", "p2p_read"};
    int code = enter_device("nvmlDeviceGetP2PStatus", one);
    if (!code)
        code = enter_device("nvmlDeviceGetP2PStatus", other);
    if (code)
        return code;
    if (one == other || what >= sizeof KEYS / sizeof *KEYS || !out)
        return INVALID_ARGUMENT;
    const struct json *pair = find_pair(one, other);
    const char *status = json_string(pair, KEYS[what]);
    if (!status && what == 2)
        status = json_number(pair, "nvlink_lanes", 0) > 0 ? "ok" : "not_supported";
    if (!status && what == 3)
        status = "not_supported";
    *out = 6;
    for (unsigned i = 0; status && i < sizeof STATUSES / sizeof *STATUSES; i++)
        if (!strcmp(status, STATUSES[i]))
            *out = i;
    return OK;
}

/* Which error says that a card has no such link: none at all, or the number is too high. */
static int no_link(const struct device *device)
{
    return link_peer(device, 0) == -2 ? NOT_SUPPORTED : INVALID_ARGUMENT;
}

API int nvmlDeviceGetNvLinkState(struct device *device, unsigned link, unsigned *out)
{
    int code = enter_device("nvmlDeviceGetNvLinkState", device);
    if (code)
        return code;
    int peer = link < MOST_LINKS ? link_peer(device, link) : -2;
    if (peer == -2)
        return no_link(device);
    *out = peer >= 0;
    return OK;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *device, unsigned link, struct pci_info *out)
{
    int code = enter_device("nvmlDeviceGetNvLinkRemotePciInfo", device);
    if (code)
        return code;
    int peer = link < MOST_LINKS ? link_peer(device, link) : -2;
    if (peer == -2)
        return no_link(device);
    if (peer < 0)
        return NOT_SUPPORTED;
    if (fabric()) { /* a guest does not see the switch */
        fill_pci(out, ~0u, 0xff, 0xff, 0);
        snprintf(out->bus_id, sizeof out->bus_id, "FFFFFFFF:FF:FF.0");
    } else {
        fill_pci(out, devices[peer].domain, devices[peer].bus, devices[peer].slot, 0x220410de);
    }
    return OK;
}

API int nvmlDeviceGetNvLinkRemotePciInfo(struct device *device, unsigned link, struct pci_info *out)
{
    return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, out);
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *device, unsigned link, unsigned *out)
{
    int code = enter_device("nvmlDeviceGetNvLinkRemoteDeviceType", device);
    if (code)
        return code;
    int peer = link < MOST_LINKS ? link_peer(device, link) : -2;
    if (peer == -2)
        return no_link(device);
    *out = peer < 0 ? 0xff : fabric() ? 2 : 0;
    return OK;
}
