/* Shifts the wall clock of a process by the seconds in the file SHIFTED_BY, which may change at any time; the monotonic
   clock stays. (libfaketime has NVFlare wait for ever: it shifts what sleeps and locks wait for, too.) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *shift;
__attribute__((constructor)) static void look(void) {
    int file = open(getenv("SHIFTED_BY"), O_RDONLY);
    void *page = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (page != MAP_FAILED) shift = page;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec, now->tv_usec = t.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (now) *now = t.tv_sec;
    return t.tv_sec;
}
