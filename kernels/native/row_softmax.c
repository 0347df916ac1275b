/* Reduces rows of logits to their softmax statistics on a CPU, and turns them into the
   softmax that is kept for the backward pass, as a custom call of XLA.

   XLA's CPU backend reads the logits some seven times, mostly on one thread. Here a row
   is read from memory once: for its maximum, and then, from the cache, for everything
   else. The sums of a row are those of softmax_stats.py, in the order of its logits.

   Shapes: logits [N, V] float32, targets [N] int32 (-1 for none) and the inverse
   temperature [] float32. weights [N, V] take the place of the logits: e^((z - m)/t) of
   logits z and their maximum m. stats [N, 8] float32.

   library.py builds this file. */

#include "custom_call.h"

#define MASKED -1e30f
enum { STATS = 8, ROWS_BYTES = 1 << 18 /* that a thread takes at a time */ };

typedef struct {
  Job job;
  float *logits, *stats; /* logits become weights */
  const int32_t *targets;
  long rows, vocab, rows_a_chunk;
  float inverse;
} Softmax;

INLINE Floats load(const float *x, long count) {
  if (count >= LANES) return *(const AnyFloats *)x;
  float values[LANES];
  for (int i = 0; i < LANES; i++) values[i] = i < count ? x[i] : MASKED;
  return *(AnyFloats *)values;
}

static float largest(const float *row, long count) {
  Floats top = spread(MASKED);
  for (long i = 0; i < count; i += LANES) {
    Floats x = load(row + i, count - i);
    Words is_more = (Words)(x > top);
    top = (Floats)(((Words)x & is_more) | ((Words)top & ~is_more));
  }
  float result = MASKED;
  for (int i = 0; i < LANES; i++) result = top[i] > result ? top[i] : result;
  return result;
}

INLINE void run_row(const Softmax *s, long row, int is_tempered) {
  float *logits = s->logits + row * s->vocab, *stats = s->stats + row * STATS;
  int32_t target = s->targets[row];
  float chosen = target >= 0 && target < s->vocab ? logits[target] : 0;
  float top = largest(logits, s->vocab);
  Floats total = {0}, mean = {0}, plain_total = {0}, plain_mean = {0};
  Floats square_total = {0}, square_mean = {0};
  for (long i = 0; i < s->vocab; i += LANES) {
    long count = s->vocab - i;
    Floats d = load(logits + i, count) - top, plain = exponential(d);
    Floats weights = is_tempered ? exponential(d * s->inverse) : plain;
    total += weights, mean += d * weights;
    if (is_tempered) plain_total += plain, plain_mean += d * plain;
    square_total += plain * plain, square_mean += d * plain * plain;
    store(logits + i, weights, count);
  }
  stats[0] = top, stats[1] = sum_of_lanes(total), stats[2] = sum_of_lanes(mean);
  stats[3] = is_tempered ? sum_of_lanes(plain_total) : stats[1];
  stats[4] = is_tempered ? sum_of_lanes(plain_mean) : stats[2];
  stats[5] = sum_of_lanes(square_total), stats[6] = sum_of_lanes(square_mean);
  stats[7] = chosen;
}

static void run_rows(Job *job, long chunk, long next) {
  (void)next;
  const Softmax *s = (const Softmax *)job;
  long row = chunk * s->rows_a_chunk, end = row + s->rows_a_chunk;
  if (end > s->rows) end = s->rows;
  for (; row < end; row++)
    if (s->inverse == 1)
      run_row(s, row, 0);
    else
      run_row(s, row, 1);
}

static int has_shapes(XLA_FFI_Buffer **args, XLA_FFI_Buffer **rets) {
  const XLA_FFI_Buffer *logits = args[0], *weights = rets[0], *stats = rets[1];
  if (logits->rank != 2 || weights->rank != 2 || stats->rank != 2) return 0;
  if (args[1]->rank != 1 || args[2]->rank != 0) return 0;
  if (args[1]->dtype != XLA_FFI_DataType_S32) return 0;
  const XLA_FFI_Buffer *floats[] = {logits, args[2], weights, stats};
  for (int i = 0; i < 4; i++)
    if (floats[i]->dtype != XLA_FFI_DataType_F32) return 0;
  if (weights->dims[0] != logits->dims[0] || weights->dims[1] != logits->dims[1]) return 0;
  if (args[1]->dims[0] != logits->dims[0] || stats->dims[0] != logits->dims[0]) return 0;
  return stats->dims[1] == STATS && weights->data == logits->data;
}

XLA_FFI_Error *jaxrl_keep_softmax(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  if (frame->args.size != 3 || frame->rets.size != 2)
    return fail(frame, "jaxrl_keep_softmax takes three arrays and returns two");
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  XLA_FFI_Buffer **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  if (!has_shapes(args, rets))
    return fail(frame, "jaxrl_keep_softmax: shapes or types do not fit together");
  Softmax *s = calloc(1, sizeof *s);
  if (!s) return fail(frame, "jaxrl_keep_softmax: out of memory");
  s->logits = rets[0]->data, s->stats = rets[1]->data;
  s->targets = args[1]->data, s->inverse = *(const float *)args[2]->data;
  s->rows = args[0]->dims[0], s->vocab = args[0]->dims[1];
  s->rows_a_chunk = ROWS_BYTES / (s->vocab * 4 + 1) + 1;
  s->job.run = run_rows;
  s->job.num_chunks = (s->rows + s->rows_a_chunk - 1) / s->rows_a_chunk;
  run_job(frame, &s->job, s->rows * s->vocab * 4);
  release(&s->job);
  return NULL;
}
