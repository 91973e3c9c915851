// Loaded with LD_PRELOAD: a file system without locks, or with latency, and a wall clock that jumps.
//   TORTURE_NO_LOCKS=1   flock and fcntl locks fail with ENOLCK
//   TORTURE_SLOW_MS=N    each open for writing, fsync and rename takes N ms
//   TORTURE_READ_ONLY=F  as soon as the file F exists, files of relative paths cannot be opened for writing or renamed
//   TORTURE_CLOCK=1      the wall clock jumps by up to a day, forward and back, at each reading
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static void slow(void) {
    const char *text = getenv("TORTURE_SLOW_MS");
    if (!text) return;
    struct timespec span = {atoi(text) / 1000, atoi(text) % 1000 * 1000000L};
    nanosleep(&span, NULL);
}

static int is_read_only(const char *path) {
    const char *switched = getenv("TORTURE_READ_ONLY");
    return switched && path[0] != '/' && access(switched, F_OK) == 0;
}

#define OPEN(NAME) \
    int NAME(const char *path, int flags, ...) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
        va_end(arguments); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && is_read_only(path)) { errno = EROFS; return -1; } \
        int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #NAME); \
        return next(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

int flock(int descriptor, int operation) {
    if (getenv("TORTURE_NO_LOCKS")) { errno = ENOLCK; return -1; }
    int (*next)(int, int) = dlsym(RTLD_NEXT, "flock");
    return next(descriptor, operation);
}

int fsync(int descriptor) {
    slow();
    int (*next)(int) = dlsym(RTLD_NEXT, "fsync");
    return next(descriptor);
}

int rename(const char *from, const char *to) {
    slow();
    if (is_read_only(to)) { errno = EROFS; return -1; }
    int (*next)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return next(from, to);
}

static time_t jump(void) {
    static unsigned calls;
    return getenv("TORTURE_CLOCK") ? (time_t)(++calls * 7919u % 172800u) - 86400 : 0;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int (*next)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int (*next)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int result = next(now, zone);
    now->tv_sec += jump();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
