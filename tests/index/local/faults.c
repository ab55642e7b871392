/* Makes system calls fail for files whose path contains a text; see faults.py.

   FAULT_PATH   part of the path
   FAULT_CALL   read, write, sync or truncate
   FAULT_ERRNO  the error number
   FAULT_FROM   reads that touch bytes from here on fail
   FAULT_SKIP   this many calls succeed first
   FAULT_COUNT  this many calls fail, then they succeed again; all without it
   FAULT_FILE   nothing fails unless this file exists
   FAULT_KILL   instead of failing, the process is killed: in the middle of a write, or after
                anything else was done
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

static int fails(int fd, const char *call, long end) {
  static long seen = 0;
  const char *part = getenv("FAULT_PATH"), *kind = getenv("FAULT_CALL");
  const char *file = getenv("FAULT_FILE");
  char link[64], path[4096];
  int before = errno;
  if (!part || !kind || strcmp(kind, call)) return 0;
  if (file && access(file, F_OK)) { errno = before; return 0; }
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  errno = before;
  if (size < 0) return 0;
  path[size] = 0;
  if (!strstr(path, part) || end <= number("FAULT_FROM", -1)) return 0;
  long place = seen++ - number("FAULT_SKIP", 0);
  if (place < 0 || place >= number("FAULT_COUNT", 1L << 60)) return 0;
  errno = (int)number("FAULT_ERRNO", EIO);
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int fd, void *data, size_t size) {
  return fails(fd, "read", 1L << 60) ? -1 : REAL(read)(fd, data, size);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
  return fails(fd, "read", at + (long)size) ? -1 : REAL(pread)(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
  return fails(fd, "read", at + (long)size) ? -1 : REAL(pread64)(fd, data, size, at);
}
static long total(const struct iovec *parts, int count) {
  long size = 0;
  for (int i = 0; i < count; i++) size += (long)parts[i].iov_len;
  return size;
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) {
  return fails(fd, "read", at + total(parts, count)) ? -1 : REAL(preadv)(fd, parts, count, at);
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
  return fails(fd, "read", at + total(parts, count)) ? -1 : REAL(preadv64)(fd, parts, count, at);
}
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
  if (fails(fd, "read", at + total(parts, count))) return -1;
  return REAL(preadv2)(fd, parts, count, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
  if (fails(fd, "read", at + total(parts, count))) return -1;
  return REAL(preadv64v2)(fd, parts, count, at, flags);
}
static int dies(void) { return getenv("FAULT_KILL") != NULL; }
static int die(void) { return kill(getpid(), SIGKILL); }

ssize_t write(int fd, const void *data, size_t size) {
  if (!fails(fd, "write", 1L << 60)) return REAL(write)(fd, data, size);
  return dies() ? REAL(write)(fd, data, size / 2), die() : -1;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  if (!fails(fd, "write", 1L << 60)) return REAL(pwrite)(fd, data, size, at);
  return dies() ? REAL(pwrite)(fd, data, size / 2, at), die() : -1;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  if (!fails(fd, "write", 1L << 60)) return REAL(pwrite64)(fd, data, size, at);
  return dies() ? REAL(pwrite64)(fd, data, size / 2, at), die() : -1;
}
int fsync(int fd) {
  if (!fails(fd, "sync", 1L << 60)) return REAL(fsync)(fd);
  return dies() ? REAL(fsync)(fd), die() : -1;
}
int fdatasync(int fd) {
  if (!fails(fd, "sync", 1L << 60)) return REAL(fdatasync)(fd);
  return dies() ? REAL(fdatasync)(fd), die() : -1;
}
int ftruncate(int fd, off_t size) {
  if (!fails(fd, "truncate", 1L << 60)) return REAL(ftruncate)(fd, size);
  return dies() ? REAL(ftruncate)(fd, size), die() : -1;
}
int ftruncate64(int fd, off64_t size) {
  if (!fails(fd, "truncate", 1L << 60)) return REAL(ftruncate64)(fd, size);
  return dies() ? REAL(ftruncate64)(fd, size), die() : -1;
}
