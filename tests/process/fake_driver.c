/* A driver with two cards, as much of NVML and of CUDA as is asked of it. NVML (libnvidia-ml.so.1) counts the small card
 * first; CUDA (libcuda.so.1) the fast one. Process FAKE_HOLDER computes on card 0; FAKE_STATUS is what nvmlInit returns. */

#include <stdlib.h>
#include <string.h>

#define GIB (1ull << 30)
#define NO_SUCH 2
#define TOO_SMALL 7

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Load;

static const char *names[] = {"NVIDIA T4", "NVIDIA GeForce RTX 3090"};
static const char *uuids[] = {"GPU-aa000000-0000-0000-0000-000000000000", "GPU-bb000000-0000-0000-0000-000000000000"};

static unsigned number(const char *variable) {
    const char *text = getenv(variable);
    return text ? (unsigned)atoi(text) : 0;
}

int nvmlInitWithFlags(unsigned flags) { return (int)number("FAKE_STATUS"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return "a fault that was made up"; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    strncpy(text, "560.35", length);
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { /* a handle is the number, plus 1 */
    *handle = (void *)(size_t)(index + 1);
    return index < 2 ? 0 : NO_SUCH;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned length) {
    strncpy(text, names[(size_t)handle - 1], length);
    return 0;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    strncpy(text, uuids[(size_t)handle - 1], length);
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    int is_held = handle == (void *)1 && number("FAKE_HOLDER");
    memory->total = handle == (void *)1 ? 16 * GIB : 24 * GIB;
    memory->used = is_held ? 6 * GIB : 0;
    memory->free = memory->total - memory->used;
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *handle, Load *load) {
    load->gpu = handle == (void *)1 && number("FAKE_HOLDER") ? 97 : 0;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    unsigned room = *count, pid = number("FAKE_HOLDER");
    *count = handle == (void *)1 && pid ? 1 : 0;
    if (*count > room) return TOO_SMALL;
    if (*count) processes[0] = (Process){pid, 5 * GIB, ~0u, ~0u};
    return 0;
}

int cuInit(unsigned flags) { return 0; }

int cuDeviceGetCount(int *count) { /* CUDA_VISIBLE_DEVICES=0 shows one card */
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible && !strcmp(visible, "0") ? 1 : 2;
    return 0;
}

int cuDeviceGet(int *device, int order) {
    *device = order;
    return 0;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[0] = (char)(device ? 0xaa : 0xbb);
    return 0;
}
