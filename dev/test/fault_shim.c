/*
Faults of a file system, for test_faults.py: an LD_PRELOAD library that makes the system calls which
change files fail, write less than they were asked to, or take long.

The kernel hands such calls to a signal handler (seccomp, SECCOMP_RET_TRAP), so that libc's own,
inside fwrite() and the like, are met too. Environment:
  FAULT_PATH   only calls on paths that contain this
  FAULT_LOG    a file that gets a line "NAME PATH" for each such call; the calls that are numbered are these, from 1
  FAULT_AT     number of the call that fails, with FAULT_ERRNO; 0: none
  FAULT_LASTS  1: all later ones fail too, and what removes files (which isn't numbered)
  FAULT_SHORT  a write takes at most so many bytes; 0: all
  FAULT_SLEEP  milliseconds that an fsync takes
A program that starts another loses the handler, and the other dies by SIGSYS.
*/
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#if defined(__x86_64__)
#define REGISTER(context, i) \
    ((context)->uc_mcontext.gregs[(const int[]){REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8}[i]])
#define RESULT(context) ((context)->uc_mcontext.gregs[REG_RAX])
#elif defined(__aarch64__)
#define REGISTER(context, i) ((context)->uc_mcontext.regs[i])
#define RESULT(context) ((context)->uc_mcontext.regs[0])
#endif

// Where the call's path is: it has a descriptor, a path, or a directory's descriptor and a path.
typedef enum { OF_DESCRIPTOR, OF_PATH, OF_DIRECTORY_AND_PATH } Kind;

typedef struct {
    const char *name;
    int number;
    Kind kind;
    int removes;
} Call;

static const Call CALLS[] = {
    {"open", SYS_openat, OF_DIRECTORY_AND_PATH, 0},
    {"write", SYS_write, OF_DESCRIPTOR, 0},
    {"write", SYS_writev, OF_DESCRIPTOR, 0},
    {"write", SYS_pwrite64, OF_DESCRIPTOR, 0},
    {"fsync", SYS_fsync, OF_DESCRIPTOR, 0},
    {"truncate", SYS_ftruncate, OF_DESCRIPTOR, 0},
    {"rename", SYS_renameat, OF_DIRECTORY_AND_PATH, 0},
    {"rename", SYS_renameat2, OF_DIRECTORY_AND_PATH, 0},
    {"mkdir", SYS_mkdirat, OF_DIRECTORY_AND_PATH, 0},
    {"remove", SYS_unlinkat, OF_DIRECTORY_AND_PATH, 1},
#ifdef SYS_rename // the older ones, which newer architectures lack
    {"open", SYS_open, OF_PATH, 0},
    {"rename", SYS_rename, OF_PATH, 0},
    {"mkdir", SYS_mkdir, OF_PATH, 0},
    {"remove", SYS_unlink, OF_PATH, 1},
    {"remove", SYS_rmdir, OF_PATH, 1},
#endif
};
enum { NUM_CALLS = sizeof(CALLS) / sizeof(CALLS[0]), NUM_ARGUMENTS = 5 };

// As a sixth argument, which none of the calls has: from the handler, not to be trapped again.
static const unsigned long OURS = 0x6661756c;

static const char *path_part;
static long fail_at, fail_errno, fail_lasts, short_bytes, sleep_ms;
static int log_file = -1;
static atomic_long numbered;

static long number_of(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

// The call itself, with the arguments as they may have been changed; a result below 0 is an errno.
static long call_through(int number, const long a[NUM_ARGUMENTS]) {
    long result = syscall(number, a[0], a[1], a[2], a[3], a[4], OURS);
    return result < 0 ? -errno : result;
}

static const char *path_of(const Call *call, const long a[NUM_ARGUMENTS], char text[512]) {
    if (call->kind == OF_PATH) return (const char *)a[0];
    if (call->kind == OF_DIRECTORY_AND_PATH) return (const char *)a[1];
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", (int)a[0]);
    ssize_t length = readlink(link, text, 511);
    text[length < 0 ? 0 : length] = '\0';
    return text;
}

static int only_reads(const Call *call, const long a[NUM_ARGUMENTS]) {
    long flags = call->kind == OF_PATH ? a[1] : a[2];
    return strcmp(call->name, "open") == 0 && (flags & O_ACCMODE) == O_RDONLY;
}

static void sleep_whole(long milliseconds) {
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
}

static long write_short(int number, long a[NUM_ARGUMENTS]) {
    if (number == SYS_write || number == SYS_pwrite64) {
        if (a[2] > short_bytes) a[2] = short_bytes;
        return call_through(number, a);
    }
    struct iovec first = *(const struct iovec *)a[1];
    for (long i = 1; first.iov_len == 0 && i < a[2]; i++) {
        first = ((const struct iovec *)a[1])[i];
    }
    if (first.iov_len > (size_t)short_bytes) first.iov_len = (size_t)short_bytes;
    return call_through(number, (const long[NUM_ARGUMENTS]){a[0], (long)&first, 1});
}

static long faulty(const Call *call, long a[NUM_ARGUMENTS]) {
    char text[512], line[600];
    const char *path = path_of(call, a, text);
    if (!strstr(path, path_part) || only_reads(call, a)) return call_through(call->number, a);
    long count = call->removes ? numbered : ++numbered;
    if (!call->removes && log_file >= 0) {
        int length = snprintf(line, sizeof(line), "%s %s\n", call->name, path);
        syscall(SYS_write, log_file, line, length, 0, 0, OURS);
    }
    if (fail_at && (fail_lasts ? count >= fail_at : count == fail_at && !call->removes)) return -fail_errno;
    if (call->number == SYS_fsync && sleep_ms) sleep_whole(sleep_ms);
    if (short_bytes && strcmp(call->name, "write") == 0) return write_short(call->number, a);
    return call_through(call->number, a);
}

static void on_trap(int signal_number, siginfo_t *info, void *opaque) {
    (void)signal_number;
    ucontext_t *context = opaque;
    int saved = errno;
    long arguments[NUM_ARGUMENTS];
    for (int i = 0; i < NUM_ARGUMENTS; i++) {
        arguments[i] = (long)REGISTER(context, i);
    }
    for (int i = 0; i < NUM_CALLS; i++) {
        if (CALLS[i].number == info->si_syscall) RESULT(context) = faulty(&CALLS[i], arguments);
    }
    errno = saved;
}

static void refuse(const char *what) {
    fprintf(stderr, "fault_shim: %s: %s\n", what, strerror(errno));
    _exit(99);
}

// "Let it through if it is ours; trap it if it is one of CALLS; else let it through."
static void install_filter(void) {
    enum { MOST = 5 + 2 * NUM_CALLS };
    struct sock_filter program[MOST];
    const unsigned int low_half_of_sixth = offsetof(struct seccomp_data, args[5]);
    unsigned short length = 0;
    program[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, low_half_of_sixth);
    program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OURS, 0, 1);
    program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    program[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < NUM_CALLS; i++) {
        program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)CALLS[i].number, 0, 1);
        program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    }
    program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {length, program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) refuse("no_new_privs");
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) refuse("seccomp");
}

__attribute__((constructor)) static void install(void) {
    const char *log_path = getenv("FAULT_LOG");
    path_part = getenv("FAULT_PATH");
    if (!path_part) path_part = "";
    fail_at = number_of("FAULT_AT");
    fail_errno = number_of("FAULT_ERRNO");
    fail_lasts = number_of("FAULT_LASTS");
    short_bytes = number_of("FAULT_SHORT");
    sleep_ms = number_of("FAULT_SLEEP");
    if (log_path) log_file = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log_path && log_file < 0) refuse(log_path);
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGSYS, &action, NULL) != 0) refuse("sigaction");
    install_filter();
}
