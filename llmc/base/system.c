#include "system.h"
#include "util.h"

#include <errno.h>
#include <fcntl.h>
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

static const double UNLIMITED = 1e18;

// What the files of a control group's memory are called, in version 2 and in version 1.
typedef struct {
    const char *limit, *used, *inactive_file, *active_file;
} GroupFiles;
static const GroupFiles GROUP_FILES[] = {
    {"memory.max", "memory.current", "inactive_file", "active_file"},
    {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"}};

static double value_of_group(const char *directory, const char *file, const char *key, double otherwise) {
    char *path = format_string("%s/%s", directory, file);
    double value = value_in(path, key, otherwise);
    free(path);
    return value;
}

// Returns what a group's limit leaves. What it uses includes cached files, which go when memory is
// wanted.
static double left_by_group(const char *directory, const GroupFiles *files) {
    double used = value_of_group(directory, files->used, "", 0) -
                  value_of_group(directory, "memory.stat", files->inactive_file, 0) -
                  value_of_group(directory, "memory.stat", files->active_file, 0);
    return value_of_group(directory, files->limit, "", UNLIMITED) - used;
}

// Returns the least of what a group and those around it leave; `group` is its path below `root`.
static double left_by_groups(const char *root, char *group, const GroupFiles *files) {
    double left = UNLIMITED;
    for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
        *end = '\0';
        char *directory = format_string("%s%s", root, group);
        left = fmin(left, left_by_group(directory, files));
        free(directory);
    }
    return left;
}

double system_group_memory(const char *membership, const char *root) {
    char line[LINE_BYTES], *of_memory = format_string("%s/memory", root);
    FILE *file = fopen(membership, "r");
    double left = left_by_group(root, &GROUP_FILES[0]);
    while (file && fgets(line, sizeof(line), file)) { // "0::/group", or in version 1 "4:memory:/group"
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = '\0';
        if (controllers[1] == '\0') left = fmin(left, left_by_groups(root, group, &GROUP_FILES[0]));
        if (strstr(controllers, "memory")) left = fmin(left, left_by_groups(of_memory, group, &GROUP_FILES[1]));
    }
    if (file) fclose(file);
    free(of_memory);
    return left;
}

double system_available_memory(void) {
    double available = 1024 * value_in("/proc/meminfo", "MemAvailable", UNLIMITED);
    available = fmin(available, system_group_memory("/proc/self/cgroup", "/sys/fs/cgroup"));
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
        double taken = 1024 * value_in("/proc/self/status", "VmSize", 0);
        available = fmin(available, (double)address_space.rlim_cur - taken);
    }
    return available < 0 ? 0 : available;
}

void system_reserve_streams(void) {
    for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; stream++) {
        bool is_open = fcntl(stream, F_GETFD) >= 0;
        if (!is_open && open("/dev/null", O_RDONLY) != stream) die("/dev/null can't be opened: %s", strerror(errno));
    }
}

void system_wait_briefly(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (length < 0 || setenv("GOMP_SPINCOUNT", "1000", 1) != 0) return;
    path[length] = '\0';
    execv(path, argv);
}
