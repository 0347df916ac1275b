/* Attends from one query to its slot's cache on a CPU, as a custom call of XLA.

   XLA needs six products and a dozen small kernels a layer for what is little more than
   one pass over the cache. Here up to four heads of a query
   that share keys are one task: scores of
   all positions up to the query's own, their softmax, and the mean of the values. Scores
   add up over the width of a head, and values over positions, in order, so that the bits
   depend neither on the size of chunks nor on other slots or threads.

   Shapes: q [S, H, d], positions [S] int32, then the chunks' keys [S, K, d, C] and their
   values [S, K, C, d], all float32; C is a multiple of 32. The result is [S, H, d].

   library.py builds this file. */

#include <math.h>

#include "custom_call.h"

enum { BLOCK = 32, VECTORS = BLOCK / LANES };
#if defined(__AVX512F__)
enum { QUERIES = 4 }; /* 8 of 32 registers hold sums */
#else
enum { QUERIES = 2 };
#endif
enum { MAX_CHUNKS = 64 };

typedef struct {
  Job job;
  const float *q;
  const int32_t *positions;
  const float *keys[MAX_CHUNKS], *values[MAX_CHUNKS];
  long lengths[MAX_CHUNKS];
  long num_chunks, length; /* all positions together */
  float *out;
  long slots, heads, kv_heads, dim;
  atomic_int out_of_memory;
} Attention;

/* Computes e^x for x <= 0: 2^n times a polynomial in the rest of x / ln 2, to 2 units in
   the last place. */
INLINE Floats exp_of(Floats x) {
  const float round = 12582912.0f; /* 1.5 * 2^23: a sum with it has no fraction */
  Ints is_small = x < -87.0f;
  Floats n = (x * 1.44269504f + round) - round;
  Floats rest = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.0f;
  Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Floats)((Ints)(y * (Floats)power) & ~is_small);
}

/* Scores of one block of positions; `queries` is a constant. */
INLINE void block_scores(
    const float *q, const float *keys, long length, long dim, float *scores, long stride,
    int queries) {
  Floats sums[QUERIES][VECTORS];
  for (int g = 0; g < queries; g++)
    for (int v = 0; v < VECTORS; v++) sums[g][v] = (Floats){0};
  for (long i = 0; i < dim; i++)
    for (int v = 0; v < VECTORS; v++) {
      Floats key = *(const AnyFloats *)(keys + i * length + v * LANES);
      for (int g = 0; g < queries; g++) sums[g][v] += q[g * dim + i] * key;
    }
  for (int g = 0; g < queries; g++)
    for (int v = 0; v < VECTORS; v++)
      *(AnyFloats *)(scores + g * stride + v * LANES) = sums[g][v];
}

/* Adds weighted values of `count` positions to `width` columns of the output. */
INLINE void block_values(
    const float *weights, long stride, const float *values, long count, long dim,
    float *out, int queries) {
  Floats sums[QUERIES][VECTORS];
  for (int g = 0; g < queries; g++)
    for (int v = 0; v < VECTORS; v++)
      sums[g][v] = *(const AnyFloats *)(out + g * dim + v * LANES);
  for (long t = 0; t < count; t++)
    for (int v = 0; v < VECTORS; v++) {
      Floats value = *(const AnyFloats *)(values + t * dim + v * LANES);
      for (int g = 0; g < queries; g++) sums[g][v] += weights[g * stride + t] * value;
    }
  for (int g = 0; g < queries; g++)
    for (int v = 0; v < VECTORS; v++)
      *(AnyFloats *)(out + g * dim + v * LANES) = sums[g][v];
}

/* Turns the scores of `count` positions into weights; returns their sum. */
static float softmax(float *scores, long count, long padded) {
  float top = -INFINITY;
  for (long t = 0; t < count; t++) top = scores[t] > top ? scores[t] : top;
  for (long t = count; t < padded; t++) scores[t] = -INFINITY;
  Floats sums = {0};
  for (long t = 0; t < padded; t += LANES) {
    AnyFloats *place = (AnyFloats *)(scores + t);
    Floats weights = exp_of((Floats)*place - top);
    *place = weights;
    sums += weights;
  }
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  return sum;
}

/* Runs up to QUERIES heads that share keys. */
INLINE void attend(
    const Attention *a, long slot, long kv_head, long head, float *scores, int queries) {
  const long dim = a->dim, stride = a->length, end = a->positions[slot] + 1L;
  const long count = end < stride ? end : stride;
  const float *q = a->q + (slot * a->heads + head) * dim;
  float *out = a->out + (slot * a->heads + head) * dim;
  long start = 0;
  for (long c = 0; c < a->num_chunks && start < count; start += a->lengths[c++]) {
    const float *keys =
        a->keys[c] + (slot * a->kv_heads + kv_head) * dim * a->lengths[c];
    for (long t = 0; t < a->lengths[c] && start + t < count; t += BLOCK)
      block_scores(q, keys + t, a->lengths[c], dim, scores + start + t, stride, queries);
  }
  float totals[QUERIES];
  for (int g = 0; g < queries; g++) {
    long padded = (count + LANES - 1) / LANES * LANES;
    totals[g] = softmax(scores + g * stride, count, padded);
    memset(out + g * dim, 0, dim * sizeof(float));
  }
  start = 0;
  for (long c = 0; c < a->num_chunks && start < count; start += a->lengths[c++]) {
    long here = count - start < a->lengths[c] ? count - start : a->lengths[c];
    const float *values =
        a->values[c] + (slot * a->kv_heads + kv_head) * dim * a->lengths[c];
    long column = 0;
    for (; column + BLOCK <= dim; column += BLOCK)
      block_values(scores + start, stride, values + column, here, dim, out + column,
                   queries);
    for (int g = 0; g < queries; g++)
      for (long i = column; i < dim; i++)
        for (long t = 0; t < here; t++)
          out[g * dim + i] += scores[g * stride + start + t] * values[t * dim + i];
  }
  for (int g = 0; g < queries; g++)
    for (long i = 0; i < dim; i++) out[g * dim + i] /= totals[g];
}

static void run_task(Job *job, long task) {
  Attention *a = (Attention *)job;
  long group = a->heads / a->kv_heads, tiles = (group + QUERIES - 1) / QUERIES;
  long tile = task % tiles, kv_head = task / tiles % a->kv_heads;
  long slot = task / tiles / a->kv_heads;
  long head = kv_head * group + tile * QUERIES, count = group - tile * QUERIES;
  float *scores = malloc(sizeof(float) * QUERIES * a->length);
  if (!scores) {
    atomic_store(&a->out_of_memory, 1);
    return;
  }
  if (count >= QUERIES)
    attend(a, slot, kv_head, head, scores, QUERIES);
  else if (count == 3)
    attend(a, slot, kv_head, head, scores, QUERIES > 3 ? 3 : 1);
  else if (count == 2)
    attend(a, slot, kv_head, head, scores, 2);
  else
    attend(a, slot, kv_head, head, scores, 1);
  free(scores);
}

/* Reads shapes and pointers; returns 0 if they do not fit together. */
static int read_arguments(const XLA_FFI_CallFrame *frame, Attention *a) {
  long count = (frame->args.size - 2) / 2;
  if (frame->args.size < 4 || frame->args.size % 2 || count > MAX_CHUNKS) return 0;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  const XLA_FFI_Buffer *q = args[0], *positions = args[1], *y = frame->rets.rets[0];
  if (q->rank != 3 || positions->rank != 1 || args[2]->rank != 4) return 0;
  if (q->dtype != XLA_FFI_DataType_F32 || positions->dtype != XLA_FFI_DataType_S32)
    return 0;
  if (y->rank != 3 || y->dtype != XLA_FFI_DataType_F32 ||
      memcmp(y->dims, q->dims, 3 * sizeof *y->dims) || positions->dims[0] != q->dims[0])
    return 0;
  a->slots = q->dims[0], a->heads = q->dims[1], a->dim = q->dims[2];
  a->kv_heads = args[2]->dims[1], a->num_chunks = count;
  if (!a->kv_heads || a->heads % a->kv_heads) return 0;
  for (long c = 0; c < count; c++) {
    const XLA_FFI_Buffer *keys = args[2 + c], *values = args[2 + count + c];
    if (keys->rank != 4 || values->rank != 4) return 0;
    int64_t length = keys->dims[3];
    int64_t of_keys[] = {a->slots, a->kv_heads, a->dim, length};
    int64_t of_values[] = {a->slots, a->kv_heads, length, a->dim};
    if (length % BLOCK || memcmp(keys->dims, of_keys, sizeof of_keys) ||
        memcmp(values->dims, of_values, sizeof of_values))
      return 0;
    if (keys->dtype != XLA_FFI_DataType_F32 || values->dtype != XLA_FFI_DataType_F32)
      return 0;
    a->keys[c] = keys->data, a->values[c] = values->data;
    a->lengths[c] = length, a->length += length;
  }
  a->q = q->data, a->positions = positions->data, a->out = y->data;
  return 1;
}

XLA_FFI_Error *jaxrl_cached_attention(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  Attention *a = calloc(1, sizeof *a);
  if (!a) return fail(frame, "jaxrl_cached_attention: out of memory");
  if (frame->rets.size != 1 || !read_arguments(frame, a)) {
    free(a);
    return fail(frame, "jaxrl_cached_attention: shapes or types do not fit together");
  }
  long seen = 0;
  for (long slot = 0; slot < a->slots; slot++) {
    if (a->positions[slot] < 0) {
      free(a);
      return fail(frame, "jaxrl_cached_attention: a position is negative");
    }
    seen += a->positions[slot] + 1L;
  }
  a->job.run = run_task;
  long group = a->heads / a->kv_heads;
  a->job.num_chunks = a->slots * a->kv_heads * ((group + QUERIES - 1) / QUERIES);
  run_job(frame, &a->job, seen * a->kv_heads * a->dim * 8);
  int out_of_memory = atomic_load(&a->out_of_memory);
  release(&a->job);
  return out_of_memory ? fail(frame, "jaxrl_cached_attention: out of memory") : NULL;
}
