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

// Returns the value of "key: N kB" in a file of /proc, in bytes; `otherwise` where there is none.
static double proc_value(const char *path, const char *key, double otherwise) {
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    char line[256];
    double result = otherwise, kilobytes;
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), ": %lf", &kilobytes) == 1) {
            result = 1024 * kilobytes;
        }
    }
    fclose(file);
    return result;
}

static double number_in(const char *path, double otherwise) {
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    double value;
    if (fscanf(file, "%lf", &value) != 1) value = otherwise;
    fclose(file);
    return value;
}

static double cached_files(void) {
    FILE *file = fopen("/sys/fs/cgroup/memory.stat", "r");
    if (!file) return 0;
    char key[64];
    double value, sum = 0;
    while (fscanf(file, "%63s %lf", key, &value) == 2) {
        if (strcmp(key, "inactive_file") == 0 || strcmp(key, "active_file") == 0) sum += value;
    }
    fclose(file);
    return sum;
}

double system_available_memory(void) {
    const double unlimited = 1e18;
    double available = proc_value("/proc/meminfo", "MemAvailable", unlimited);
    double limit = number_in("/sys/fs/cgroup/memory.max", unlimited);
    // What a control group uses includes cached files, which go when memory is wanted.
    double used = number_in("/sys/fs/cgroup/memory.current", 0) - cached_files();
    available = minimum(available, limit - used);
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
        available = minimum(available, (double)address_space.rlim_cur - proc_value("/proc/self/status", "VmSize", 0));
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
