/* Faulty disk, to be preloaded: the n-th of the calls below on a file under a folder fails.
 *
 * faulty_disk_arm(folder, n, errno) starts to count calls; n = 0 only counts; errno = 0 kills the process before the n-th
 * call. faulty_disk_count() returns the number of calls, faulty_disk_name() the failed one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], failed[PATH_MAX + 64];
static long target, count;
static int number;

void faulty_disk_arm(const char *path, long n, int code) {
    snprintf(folder, sizeof folder, "%s", path);
    target = n;
    number = code;
    count = 0;
    failed[0] = 0;
}
long faulty_disk_count(void) { return count; }
const char *faulty_disk_name(void) { return failed; }

static int fails(const char *call, const char *path) {
    if (!folder[0] || !path || strncmp(path, folder, strlen(folder))) return 0;
    if (__sync_add_and_fetch(&count, 1) != target) return 0;
    snprintf(failed, sizeof failed, "%s %s", call, path);
    if (!number) kill(getpid(), SIGKILL);
    errno = number;
    return 1;
}
static int fails_at(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fails(call, path);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }

int open(const char *path, int flags, ...) { MODE REAL(open); return fails("open", path) ? -1 : real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE REAL(open64); return fails("open", path) ? -1 : real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE REAL(openat); return fails("open", path) ? -1 : real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE REAL(openat64); return fails("open", path) ? -1 : real(at, path, flags, mode); }
ssize_t write(int fd, const void *data, size_t size) { REAL(write); return fails_at("write", fd) ? -1 : real(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(pwrite); return fails_at("write", fd) ? -1 : real(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { REAL(pwrite64); return fails_at("write", fd) ? -1 : real(fd, data, size, at); }
int fsync(int fd) { REAL(fsync); return fails_at("fsync", fd) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return fails_at("fsync", fd) ? -1 : real(fd); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); return fails_at("truncate", fd) ? -1 : real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); return fails_at("truncate", fd) ? -1 : real(fd, size); }
int posix_fallocate(int fd, off_t at, off_t size) { REAL(posix_fallocate); return fails_at("allocate", fd) ? number : real(fd, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { REAL(posix_fallocate64); return fails_at("allocate", fd) ? number : real(fd, at, size); }
int rename(const char *from, const char *to) { REAL(rename); return fails("rename", from) ? -1 : real(from, to); }
int renameat(int a, const char *from, int b, const char *to) { REAL(renameat); return fails("rename", from) ? -1 : real(a, from, b, to); }
int link(const char *from, const char *to) { REAL(link); return fails("link", from) ? -1 : real(from, to); }
int unlink(const char *path) { REAL(unlink); return fails("unlink", path) ? -1 : real(path); }
int unlinkat(int at, const char *path, int flags) { REAL(unlinkat); return fails("unlink", path) ? -1 : real(at, path, flags); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return fails("mkdir", path) ? -1 : real(path, mode); }
