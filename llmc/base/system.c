#include "system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

void system_cpu_name(char *text, size_t bytes) {
    snprintf(text, bytes, "unknown processor");
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) return;
    char line[512];
    while (fgets(line, sizeof(line), file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            snprintf(text, bytes, "%s", colon + 2);
            text[strcspn(text, "\n")] = '\0';
            break;
        }
    }
    fclose(file);
}

static double minimum(double a, double b) { return a < b ? a : b; }

// Returns the number that follows `key` on a line of a file, as in "key: N kB" or "key N", or with
// the key "" the one that the file begins with; `otherwise` where there is none.
static double value_in(const char *path, const char *key, double otherwise) {
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    char line[256];
    double value = otherwise;
    size_t length = strlen(key);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, key, length) == 0 && sscanf(line + length + (line[length] == ':'), "%lf", &value) == 1) break;
    }
    fclose(file);
    return value;
}

double system_available_memory(void) {
    const double unlimited = 1e18;
    static const char cgroup_stat[] = "/sys/fs/cgroup/memory.stat";
    double available = 1024 * value_in("/proc/meminfo", "MemAvailable", unlimited);
    double limit = value_in("/sys/fs/cgroup/memory.max", "", unlimited);
    // What a control group uses includes cached files, which go when memory is wanted.
    double used = value_in("/sys/fs/cgroup/memory.current", "", 0) - value_in(cgroup_stat, "inactive_file", 0) -
                  value_in(cgroup_stat, "active_file", 0);
    available = minimum(available, limit - used);
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
        double taken = 1024 * value_in("/proc/self/status", "VmSize", 0);
        available = minimum(available, (double)address_space.rlim_cur - taken);
    }
    return available < 0 ? 0 : available;
}

void system_wait_briefly(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (length < 0 || setenv("GOMP_SPINCOUNT", "1000", 1) != 0) return;
    path[length] = '\0';
    execv(path, argv);
}
