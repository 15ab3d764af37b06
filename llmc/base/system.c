#include "system.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LINE_BYTES = 512 };

// Finds a file's first line that begins with `key`. Returns false where there is none.
static bool find_line(char line[LINE_BYTES], const char *path, const char *key) {
    FILE *file = fopen(path, "r");
    bool found = false;
    while (file && !found && fgets(line, LINE_BYTES, file)) {
        found = strncmp(line, key, strlen(key)) == 0;
    }
    if (file) fclose(file);
    return found;
}

void system_cpu_name(char *text, size_t bytes) {
    char line[LINE_BYTES];
    bool found = find_line(line, "/proc/cpuinfo", "model name") && strchr(line, ':');
    snprintf(text, bytes, "%s", found ? strchr(line, ':') + 2 : "unknown processor");
    text[strcspn(text, "\n")] = '\0';
}

// Returns the number that follows `key` on a line of a file, as in "key: N kB" or "key N", or with
// the key "" the one that the file begins with; `otherwise` where there is none.
static double value_in(const char *path, const char *key, double otherwise) {
    char line[LINE_BYTES];
    double value;
    if (!find_line(line, path, key)) return otherwise;
    const char *after = line + strlen(key);
    return sscanf(after + (*after == ':'), "%lf", &value) == 1 ? value : otherwise;
}

double system_available_memory(void) {
    const double unlimited = 1e18;
    static const char cgroup_stat[] = "/sys/fs/cgroup/memory.stat";
    double available = 1024 * value_in("/proc/meminfo", "MemAvailable", unlimited);
    double limit = value_in("/sys/fs/cgroup/memory.max", "", unlimited);
    // What a control group uses includes cached files, which go when memory is wanted.
    double used = value_in("/sys/fs/cgroup/memory.current", "", 0) - value_in(cgroup_stat, "inactive_file", 0) -
                  value_in(cgroup_stat, "active_file", 0);
    available = fmin(available, limit - used);
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
        double taken = 1024 * value_in("/proc/self/status", "VmSize", 0);
        available = fmin(available, (double)address_space.rlim_cur - taken);
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
