/* What kernels for CPUs share: vectors, and jobs of several threads.

   A kernel is a custom call of XLA (c_api.h of its FFI). Its work is a job of chunks,
   which the calling thread and threads of XLA's pool take until none is left. */

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__x86_64__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

enum { SHARED_BYTES = 1 << 20, MOST_PAUSES = 1 << 10 };

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef Floats AnyFloats __attribute__((aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef Words AnyWords __attribute__((aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE Floats spread(float value) { return value - (Floats){0}; }

/* The exponential of numbers that are at most 0, to 2e-7 of it; 0 below -87, where it is
   no normal number. What is not a number stays so. */
INLINE Floats exponential(Floats x) {
  const float round = 0x1.8p23f; /* what is added to it has no binary places left */
  Words is_low = (Words)(x < spread(-87.0f));
  Floats shifted = x * 0x1.715476p0f + round, whole = shifted - round;
  Floats f = x - whole * 0x1.62e4p-1f; /* ln 2 in two parts: the first has few bits */
  f = f - whole * 0x1.7f7d1cp-20f;
  Floats sum = spread(1.0f / 5040);
  const float series[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
  for (int i = 0; i < 7; i++) sum = sum * f + series[i];
  Words scaled = (Words)sum + ((Words)shifted << 23); /* times two to the whole */
  return (Floats)(scaled & ~is_low);
}

INLINE void store(float *x, Floats values, long count) {
  if (count >= LANES)
    *(AnyFloats *)x = values;
  else
    memcpy(x, &values, count * sizeof *x);
}

INLINE float sum_of_lanes(Floats x) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}

typedef struct Job {
  /* Computes a chunk; the same thread goes on with `next`, -1 if there is none. */
  void (*run)(struct Job *, long chunk, long next);
  long num_chunks;
  atomic_long next_chunk, chunks_done;
  atomic_int owners;
} Job;

static long take_chunk(Job *job) {
  long chunk = atomic_fetch_add(&job->next_chunk, 1);
  return chunk < job->num_chunks ? chunk : -1;
}

static void run_chunks(Job *job) {
  for (long chunk = take_chunk(job), next; chunk >= 0; chunk = next) {
    next = take_chunk(job);
    job->run(job, chunk, next);
    atomic_fetch_add_explicit(&job->chunks_done, 1, memory_order_release);
  }
}

static void release(Job *job) {
  if (atomic_fetch_sub(&job->owners, 1) == 1) free(job);
}

/* Runs on a thread of XLA's pool, maybe only once the job is done. */
static void help(void *job) {
  run_chunks(job);
  release(job);
}

/* Asks XLA's thread pool for help. If it has none, the caller computes everything. */
static void ask_for_help(const XLA_FFI_CallFrame *frame, Job *job) {
  int64_t num_threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count = {0};
  count.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  count.ctx = frame->ctx;
  count.num_threads = &num_threads;
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&count);
  long helpers = num_threads < job->num_chunks ? num_threads : job->num_chunks;
  for (long i = 1; !error && i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args task = {0};
    task.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    task.ctx = frame->ctx;
    task.task = help;
    task.data = job;
    atomic_fetch_add(&job->owners, 1);
    error = frame->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (error) release(job);
  }
  if (!error) return;
  XLA_FFI_Error_Destroy_Args destroy = {0};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  frame->api->XLA_FFI_Error_Destroy(&destroy);
}

/* Runs a job from calloc and waits for its end. The caller still has to release it.

   Threads take microseconds to wake, so that a job which reads little is done sooner by
   the caller alone. */
static void run_job(const XLA_FFI_CallFrame *frame, Job *job, long bytes_read) {
  atomic_store(&job->owners, 1);
  if (job->num_chunks > 1 && bytes_read >= SHARED_BYTES) ask_for_help(frame, job);
  run_chunks(job);
  for (long i = 0; /* helpers are in their last chunks: some microseconds */
       atomic_load_explicit(&job->chunks_done, memory_order_acquire) < job->num_chunks;
       i++) {
    if (i > MOST_PAUSES) sched_yield(); /* one may be waiting for this processor */
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

static XLA_FFI_Error *fail(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {0};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* Answers a call that only asks for the version of the interface. */
static int tells_version(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Metadata_Extension *asked = (XLA_FFI_Metadata_Extension *)frame->extension_start;
  if (!asked || asked->extension_base.type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = asked->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}
