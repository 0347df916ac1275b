/* Keeps blocks of memory that were freed, for the next program of the same size.

   A program of XLA takes its temporary memory from posix_memalign at each call. If glibc
   maps it, the program faults it in page by page each time, which may be a third of a
   step. If glibc takes it from its heap, a freed block is often a few bytes too small for
   the same request, as small blocks take what alignment left over, and the heap grows
   with each step. Here a freed block serves requests of its size or a little less.

   Blocks in use and idle ones together are never more than those in use once were, and
   idle ones never more than JAXRL_IDLE_BYTES: what exceeds this is given back, the block
   that has been idle longest first, from its end.

   The arrays that pass between a program's parts are smaller, and glibc does hold them in
   its heap. But it takes the block that fits best, wherever it lies, and a heap in which
   programs were compiled has many, so that what a part writes is seldom in a cache. Here
   the block that was freed last serves such a request.

   The library is loaded before libc (LD_PRELOAD). process_env.py builds it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALLEST ((size_t)32 << 20) /* from which size on glibc maps a block, at most */
#define UNIT ((size_t)2 << 20)      /* blocks begin and end at its multiples */
#define MEDIUM ((size_t)64 << 10)   /* from which size on the block freed last is taken */
#define RECENT_BYTES ((size_t)16 << 20) /* of these, at most: what caches may hold */
enum { MAX_BLOCKS = 1024, MAX_RECENT = 64 };
enum { SLACK = 8 /* a request takes all but this share of a block */ };

typedef struct {
  char *start;
  size_t size, resident; /* bytes; what lies behind the resident ones was given back */
  uint64_t freed;        /* when, counted in frees; 0 while it is in use */
} Block;

extern void *__libc_malloc(size_t), *__libc_memalign(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void __libc_free(void *);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Block blocks[MAX_BLOCKS];
static int num_blocks;
static uint64_t num_frees;
static size_t used, idle, most_used, most_idle = (size_t)1 << 30; /* bytes */
static size_t (*heap_size)(void *); /* glibc's malloc_usable_size */

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

__attribute__((constructor)) static void begin(void) {
  const char *bytes = getenv("JAXRL_IDLE_BYTES");
  if (bytes) most_idle = strtoull(bytes, NULL, 10);
  *(void **)&heap_size = dlsym(RTLD_NEXT, "malloc_usable_size");
  pthread_atfork(lock, unlock, unlock);
}

static size_t rounded(size_t bytes) { return (bytes + UNIT - 1) & ~(UNIT - 1); }

/* Gives idle memory back until at most `limit` bytes are idle. */
static void shrink(size_t limit) {
  while (idle > limit) {
    Block *oldest = NULL;
    for (Block *b = blocks; b < blocks + num_blocks; b++)
      if (b->freed && (!oldest || b->freed < oldest->freed)) oldest = b;
    size_t excess = rounded(idle - limit);
    if (excess < oldest->resident) {
      oldest->resident -= excess;
      idle -= excess;
      madvise(oldest->start + oldest->resident, excess, MADV_DONTNEED);
    } else {
      idle -= oldest->resident;
      munmap(oldest->start, oldest->size);
      *oldest = blocks[--num_blocks];
    }
  }
}

/* Counts bytes that come into use, and gives back idle ones that are now too many. */
static void use(size_t bytes) {
  used += bytes;
  if (used > most_used) most_used = used;
  shrink(most_used - used);
}

static char *map(size_t size) {
  char *mapped = mmap(
      NULL, size + UNIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return NULL;
  char *start = (char *)rounded((uintptr_t)mapped), *end = start + size;
  if (start > mapped) munmap(mapped, start - mapped);
  munmap(end, mapped + size + UNIT - end);
  return start;
}

/* Returns a block, or NULL where there is none. */
static void *take(size_t bytes) {
  if (bytes > PTRDIFF_MAX - 2 * UNIT) return NULL;
  size_t size = rounded(bytes);
  Block *best = NULL;
  for (Block *b = blocks; b < blocks + num_blocks; b++)
    if (b->freed && b->size >= size && b->size - size <= size / SLACK)
      if (!best || b->size < best->size) best = b;
  if (best) {
    char *start = best->start;
    best->freed = 0;
    idle -= best->resident;
    use(best->size); /* moves blocks */
    return start;
  }
  if (num_blocks == MAX_BLOCKS) return NULL;
  size_t most = most_used;
  use(size);
  char *start = map(size);
  if (!start) {
    shrink(0);
    start = map(size);
  }
  if (start)
    blocks[num_blocks++] = (Block){.start = start, .size = size};
  else
    used -= size, most_used = most;
  return start;
}

static void *take_locked(size_t bytes) {
  int error = errno;
  lock();
  void *start = take(bytes);
  unlock();
  errno = error;
  return start;
}

/* Blocks of glibc's heap that were freed, the last one at the end. */
static struct {
  char *start;
  size_t size;
} recent[MAX_RECENT];
static int num_recent;
static size_t recent_bytes;

static char *remove_recent(int i) {
  char *start = recent[i].start;
  recent_bytes -= recent[i].size;
  num_recent--;
  memmove(recent + i, recent + i + 1, (num_recent - i) * sizeof *recent);
  return start;
}

/* Returns the block freed last that suits a request, or NULL where there is none. */
static void *take_recent(size_t alignment, size_t bytes) {
  char *start = NULL;
  lock();
  for (int i = num_recent - 1; i >= 0 && !start; i--)
    if (recent[i].size >= bytes && recent[i].size - bytes <= bytes / SLACK)
      if (!((uintptr_t)recent[i].start & (alignment - 1))) start = remove_recent(i);
  unlock();
  return start;
}

/* Frees a block of glibc's: keeps it for a while if its size is a medium one. */
static void release_recent(void *start) {
  size_t size = start && heap_size ? heap_size(start) : 0;
  if (size < MEDIUM || size >= SMALLEST || size > RECENT_BYTES) {
    __libc_free(start);
    return;
  }
  char *dropped[MAX_RECENT];
  int count = 0;
  lock();
  for (int i = 0; i < num_recent; i++)
    if (recent[i].start == start) abort(); /* freed twice, which glibc does not see now */
  while (num_recent == MAX_RECENT || recent_bytes + size > RECENT_BYTES)
    dropped[count++] = remove_recent(0);
  recent[num_recent].start = start;
  recent[num_recent++].size = size;
  recent_bytes += size;
  unlock();
  while (count) __libc_free(dropped[--count]);
}

static int may_be_block(const void *start) {
  return start && !((uintptr_t)start & (UNIT - 1));
}

static Block *find(const void *start) {
  for (Block *b = blocks; b < blocks + num_blocks; b++)
    if (b->start == start && !b->freed) return b;
  return NULL;
}

/* Returns the bytes of a block in use, or 0 if it is none of ours. */
static size_t size_of(const void *start) {
  if (!may_be_block(start)) return 0;
  lock();
  const Block *block = find(start);
  size_t size = block ? block->size : 0;
  unlock();
  return size;
}

static int release(const void *start) {
  lock();
  Block *block = find(start);
  if (block) {
    block->freed = ++num_frees;
    block->resident = block->size;
    used -= block->size;
    idle += block->size;
    shrink(most_used - used < most_idle ? most_used - used : most_idle);
  }
  unlock();
  return block != NULL;
}

static void *take_kept(size_t alignment, size_t bytes) {
  if (bytes < MEDIUM || alignment > UNIT) return NULL;
  return bytes < SMALLEST ? take_recent(alignment, bytes) : take_locked(bytes);
}

void *malloc(size_t bytes) {
  void *start = take_kept(1, bytes);
  return start ? start : __libc_malloc(bytes);
}

void *memalign(size_t alignment, size_t bytes) {
  void *start = take_kept(alignment, bytes);
  return start ? start : __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **result, size_t alignment, size_t bytes) {
  if (!alignment || alignment % sizeof(void *) || alignment & (alignment - 1))
    return EINVAL;
  int error = errno;
  void *start = memalign(alignment, bytes);
  errno = error;
  if (!start) return ENOMEM;
  *result = start;
  return 0;
}

void free(void *start) {
  int error = errno;
  if (!may_be_block(start) || !release(start)) release_recent(start);
  errno = error;
}

void *realloc(void *start, size_t bytes) {
  size_t size = size_of(start);
  if (!size) return __libc_realloc(start, bytes);
  if (bytes && bytes <= size && bytes > size / 2) return start;
  /* What grows is likely to grow again, and is not to be copied for each little step. */
  int grows = bytes > size && bytes <= PTRDIFF_MAX / 2;
  void *moved = bytes ? malloc(grows ? bytes + bytes / SLACK : bytes) : NULL;
  if (moved) memcpy(moved, start, bytes < size ? bytes : size);
  if (moved || !bytes) free(start);
  return moved;
}

size_t malloc_usable_size(void *start) {
  size_t size = size_of(start);
  if (size) return size;
  return heap_size ? heap_size(start) : 0;
}
