/* Computes attention from one query per slot to a cache in chunks, as a custom call of
   XLA.

   For XLA's CPU backend this is some ten small programs for each chunk, each on one
   thread. Here a slot's queries that share keys are one piece of work: its keys and
   values are read once, a block of positions at a time, up to the slot's own position,
   with a running softmax between blocks. The bits of a slot therefore depend neither on
   the slots beside it nor on the number of threads. A slot whose position is not below
   the limit is idle: it reads nothing and gets zeros.

   Shapes: q [S, H, D] float32, positions [S] and limit [] int32; then the chunks of keys
   [S, K, D, C] and those of values [S, K, C, D], all float32 or all bfloat16. D is a
   multiple of LANES and C of 32. out [S, H, D] is float32.

   library.py builds this file. */

#include "custom_call.h"

#if defined(__x86_64__) && !defined(__AVX512F__)
enum { HEADS = 3 }; /* 12 of 16 registers hold sums */
#else
enum { HEADS = 4 }; /* 16 of 32 */
#endif
enum { VECTORS = 4, BLOCK = VECTORS * LANES };
enum { STEP = BLOCK < 32 ? BLOCK : 32 /* divides chunks */ };
enum { MOST_CHUNKS = 16, MOST_WIDTH = 512, LINE_BYTES = 64, PIECE_BYTES = 1 << 18 };
enum { FIXED = 3, NEW = 2 /* arguments before the chunks */ };

#define NEGATIVE -1e30f

const int jaxrl_lanes = LANES;

typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef Halves AnyHalves __attribute__((aligned(2), may_alias));

typedef struct {
  Job job;
  const float *q;
  const int32_t *positions;
  float *out;
  long heads, kv_heads, width, limit;
  long num_pairs, pairs_a_piece; /* of a slot and a head of its keys */
  long num_chunks, sizes[MOST_CHUNKS];
  char *keys[MOST_CHUNKS], *values[MOST_CHUNKS];
  const char *new_keys, *new_values; /* NULL if they are in the chunks already */
  int is_bfloat16;
} Attention;

/* A block of positions of one head's keys and values. */
typedef struct {
  const char *keys, *values;
  long row; /* bytes from one row of the keys to the next */
} Block;

/* The running softmax of some heads that share keys. */
typedef struct {
  float top[HEADS], total[HEADS];
  float out[HEADS][MOST_WIDTH];
} State;

/* Processors do not see by themselves what is read after some kilobytes. */
INLINE void fetch(const char *bytes, long count) {
  for (long at = 0; at < count; at += LINE_BYTES) __builtin_prefetch(bytes + at);
}

INLINE Floats load(const char *array, long index, int is_bfloat16) {
  if (!is_bfloat16) return *(const AnyFloats *)(array + 4 * index);
  Halves halves = *(const AnyHalves *)(array + 2 * index);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

static float exponential_of(float x) { return exponential(spread(x))[0]; }

INLINE float largest(const float *x, int count) {
  float folded[BLOCK];
  memcpy(folded, x, 4 * count);
  for (int half = count / 2; half; half /= 2)
    for (int i = 0; i < half; i++)
      folded[i] = folded[i] > folded[i + half] ? folded[i] : folded[i + half];
  return folded[0];
}

INLINE float sum_of(const float *x, int count) {
  float folded[BLOCK];
  memcpy(folded, x, 4 * count);
  for (int half = count / 2; half; half /= 2)
    for (int i = 0; i < half; i++) folded[i] += folded[i + half];
  return folded[0];
}

/* Adds to `vectors` vectors of each head's output what the values of a block give. */
INLINE void add_values(
    const Attention *a, State *s, Block block, Block next, long visible,
    const float weights[HEADS][BLOCK], long at, int vectors, int heads, int is_bfloat16) {
  Floats sums[HEADS][VECTORS];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++)
      sums[h][v] = *(AnyFloats *)(s->out[h] + at + v * LANES);
  for (long i = 0; i < visible; i++) {
    Floats row[VECTORS];
    for (int v = 0; v < vectors; v++)
      row[v] = load(block.values, i * a->width + at + v * LANES, is_bfloat16);
    for (long d = i; !at && d < a->width; d += visible)
      fetch(next.keys + d * next.row, BLOCK * (is_bfloat16 ? 2 : 4));
    for (int h = 0; h < heads; h++)
      for (int v = 0; v < vectors; v++) sums[h][v] += weights[h][i] * row[v];
  }
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++)
      *(AnyFloats *)(s->out[h] + at + v * LANES) = sums[h][v];
}

/* Takes `vectors` vectors of positions into the state, of which `visible` count. */
INLINE void add_block(
    const Attention *a, State *s, const float *q, Block block, Block next, long visible,
    int vectors, int heads, int is_bfloat16) {
  const long width = a->width, bytes = vectors * LANES * (is_bfloat16 ? 2 : 4);
  float weights[HEADS][BLOCK];
  Floats sums[HEADS][VECTORS];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) sums[h][v] = (Floats){0};
  for (long d = 0; d < width; d++) {
    Floats row[VECTORS];
    for (int v = 0; v < vectors; v++)
      row[v] = load(block.keys + d * block.row, v * LANES, is_bfloat16);
    fetch(block.values + d * bytes, bytes);
    for (int h = 0; h < heads; h++)
      for (int v = 0; v < vectors; v++) sums[h][v] += q[h * width + d] * row[v];
  }
  for (int h = 0; h < heads; h++) {
    float *scores = weights[h];
    memcpy(scores, sums[h], vectors * sizeof(Floats));
    for (long i = visible; i < vectors * LANES; i++) scores[i] = NEGATIVE;
    float top = largest(scores, vectors * LANES);
    if (top > s->top[h]) {
      float scale = exponential_of(s->top[h] - top);
      s->top[h] = top;
      s->total[h] *= scale;
      for (long d = 0; d < width; d++) s->out[h][d] *= scale;
    }
    for (int v = 0; v < vectors; v++) {
      AnyFloats *part = (AnyFloats *)(scores + v * LANES);
      *part = exponential(*part - s->top[h]);
    }
    for (long i = visible; i < vectors * LANES; i++) scores[i] = 0;
    s->total[h] += sum_of(scores, vectors * LANES);
  }
  long at = 0;
  for (; at + VECTORS * LANES <= width; at += VECTORS * LANES)
    add_values(a, s, block, next, visible, weights, at, VECTORS, heads, is_bfloat16);
  for (; at < width; at += LANES)
    add_values(a, s, block, next, visible, weights, at, 1, heads, is_bfloat16);
}

static Block block_at(const Attention *a, long pair, long chunk, long first) {
  const long bytes = a->is_bfloat16 ? 2 : 4, size = a->sizes[chunk];
  const long skipped = pair * size * a->width;
  return (Block){
      a->keys[chunk] + (skipped + first) * bytes,
      a->values[chunk] + (skipped + first * a->width) * bytes,
      size * bytes,
  };
}

/* Computes some heads that share keys; the last two are constants. */
INLINE void attend(
    const Attention *a, long pair, long after, long head, int heads, int is_bfloat16) {
  const long width = a->width, row = head * width;
  long visible = (long)a->positions[pair / a->kv_heads] + 1;
  State s;
  for (int h = 0; h < heads; h++) {
    s.top[h] = NEGATIVE, s.total[h] = 0;
    memset(s.out[h], 0, 4 * width);
  }
  const float *q = a->q + row;
  Block block = block_at(a, pair, 0, 0);
  for (long chunk = 0, first = 0; visible > 0 && chunk < a->num_chunks;) {
    int is_whole = a->sizes[chunk] - first >= BLOCK;
    long count = is_whole ? BLOCK : STEP, seen = visible < count ? visible : count;
    visible -= count, first += count;
    if (first == a->sizes[chunk]) chunk++, first = 0;
    int goes_on = visible > 0 && chunk < a->num_chunks;
    Block next = goes_on ? block_at(a, pair, chunk, first) : block_at(a, after, 0, 0);
    if (is_whole)
      add_block(a, &s, q, block, next, seen, VECTORS, heads, is_bfloat16);
    else
      add_block(a, &s, q, block, next, seen, STEP / LANES, heads, is_bfloat16);
    block = next;
  }
  for (int h = 0; h < heads; h++)
    for (long d = 0; d < width; d++)
      a->out[row + h * width + d] = s.out[h][d] / s.total[h];
}

INLINE void group(const Attention *a, long pair, long after, int is_bfloat16) {
  long count = a->heads / a->kv_heads, head = pair * count, end = head + count;
  long position = a->positions[pair / a->kv_heads];
  if (position < 0 || position >= a->limit) {
    memset(a->out + head * a->width, 0, count * a->width * sizeof *a->out);
    return;
  }
  for (; head + HEADS <= end; head += HEADS)
    attend(a, pair, after, head, HEADS, is_bfloat16);
  if (HEADS > 3 && head + 3 == end) attend(a, pair, after, head, 3, is_bfloat16);
  if (head + 2 == end) attend(a, pair, after, head, 2, is_bfloat16);
  if (head + 1 == end) attend(a, pair, after, head, 1, is_bfloat16);
}

/* Writes the new key and value of a slot and a head. */
INLINE void write(const Attention *a, long pair, int is_bfloat16) {
  const long bytes = is_bfloat16 ? 2 : 4, width = a->width;
  long at = a->positions[pair / a->kv_heads], chunk = 0;
  for (; chunk < a->num_chunks && at >= a->sizes[chunk]; chunk++) at -= a->sizes[chunk];
  if (at < 0 || chunk == a->num_chunks) return;
  const long size = a->sizes[chunk];
  char *key = a->keys[chunk] + (pair * size * width + at) * bytes;
  char *value = a->values[chunk] + (pair * size + at) * width * bytes;
  for (long d = 0; d < width; d++)
    memcpy(key + d * size * bytes, a->new_keys + (pair * width + d) * bytes, bytes);
  memcpy(value, a->new_values + pair * width * bytes, width * bytes);
}

/* `after` is the pair that the same thread computes next. */
INLINE void run_pair(const Attention *a, long pair, long after, int is_bfloat16) {
  if (a->new_keys) write(a, pair, is_bfloat16);
  group(a, pair, after, is_bfloat16);
}

static void run_piece(Job *job, long piece, long next) {
  const Attention *a = (const Attention *)job;
  long pair = piece * a->pairs_a_piece, end = pair + a->pairs_a_piece;
  if (end > a->num_pairs) end = a->num_pairs;
  for (; pair < end; pair++) {
    long after = pair + 1 < end ? pair + 1 : next < 0 ? pair : next * a->pairs_a_piece;
    if (a->is_bfloat16)
      run_pair(a, pair, after, 1);
    else
      run_pair(a, pair, after, 0);
  }
}

static int is_array(const XLA_FFI_Buffer *x, int dtype, const int64_t *shape, int rank) {
  if ((int)x->dtype != dtype || x->rank != rank) return 0;
  for (int i = 0; i < rank; i++)
    if (x->dims[i] != shape[i]) return 0;
  return 1;
}

/* Returns whether all shapes and types fit, and fills in the chunks. */
static int read_arguments(
    Attention *a, XLA_FFI_Buffer **args, XLA_FFI_Buffer **rets, XLA_FFI_Buffer **chunks) {
  const XLA_FFI_Buffer *q = args[0], *keys = chunks[0];
  if (q->rank != 3 || keys->rank != 4) return 0;
  int64_t slots = q->dims[0], kv_heads = keys->dims[1], width = q->dims[2];
  int dtype = keys->dtype, is_written = chunks != args + FIXED;
  int64_t new_shape[] = {slots, kv_heads, width};
  if (dtype != XLA_FFI_DataType_F32 && dtype != XLA_FFI_DataType_BF16) return 0;
  if (!is_array(q, XLA_FFI_DataType_F32, q->dims, 3)) return 0;
  if (!is_array(rets[0], XLA_FFI_DataType_F32, q->dims, 3)) return 0;
  if (!is_array(args[1], XLA_FFI_DataType_S32, &slots, 1)) return 0;
  if (!is_array(args[2], XLA_FFI_DataType_S32, NULL, 0)) return 0;
  if (kv_heads < 1 || q->dims[1] % kv_heads || width % LANES || width > MOST_WIDTH)
    return 0;
  a->q = q->data, a->positions = args[1]->data, a->out = rets[0]->data;
  a->limit = *(const int32_t *)args[2]->data;
  a->heads = q->dims[1], a->kv_heads = kv_heads, a->width = width;
  a->num_pairs = slots * kv_heads;
  a->is_bfloat16 = dtype == XLA_FFI_DataType_BF16;
  for (long i = 0; i < a->num_chunks; i++) {
    const XLA_FFI_Buffer *k = chunks[i], *v = chunks[a->num_chunks + i];
    int64_t size = k->rank == 4 ? k->dims[3] : 0;
    int64_t key_shape[] = {slots, kv_heads, width, size};
    int64_t value_shape[] = {slots, kv_heads, size, width};
    if (size % STEP || !is_array(k, dtype, key_shape, 4)) return 0;
    if (!is_array(v, dtype, value_shape, 4)) return 0;
    a->sizes[i] = size, a->keys[i] = k->data, a->values[i] = v->data;
    if (!is_written) continue;
    /* They take the place of those that were given. */
    if (rets[1 + i]->data != k->data) return 0;
    if (rets[1 + a->num_chunks + i]->data != v->data) return 0;
  }
  if (!is_written) return 1;
  for (int i = FIXED; i < FIXED + NEW; i++)
    if (!is_array(args[i], dtype, new_shape, 3)) return 0;
  a->new_keys = args[FIXED]->data, a->new_values = args[FIXED + 1]->data;
  return 1;
}

XLA_FFI_Error *jaxrl_chunk_attention(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  long before = FIXED + (frame->rets.size > 1 ? NEW : 0);
  long num_chunks = (frame->args.size - before) / 2;
  long results = frame->rets.size > 1 ? 1 + 2 * num_chunks : 1;
  if (frame->args.size != before + 2 * num_chunks || frame->rets.size != results ||
      num_chunks < 1 || num_chunks > MOST_CHUNKS)
    return fail(frame, "jaxrl_chunk_attention: wrong number of arrays");
  Attention *a = calloc(1, sizeof *a);
  if (!a) return fail(frame, "jaxrl_chunk_attention: out of memory");
  a->num_chunks = num_chunks;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  XLA_FFI_Buffer **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  if (!read_arguments(a, args, rets, args + before) || !a->num_pairs) {
    free(a);
    return fail(frame, "jaxrl_chunk_attention: shapes or types do not fit together");
  }
  long slots = args[0]->dims[0], read = 0;
  for (long slot = 0; slot < slots; slot++)
    read += a->positions[slot] < a->limit ? a->positions[slot] + 1 : 0;
  read *= a->kv_heads * a->width * (a->is_bfloat16 ? 4 : 8);
  a->pairs_a_piece = PIECE_BYTES / (read / a->num_pairs + 1) + 1;
  a->job.run = run_piece;
  a->job.num_chunks = (a->num_pairs + a->pairs_a_piece - 1) / a->pairs_a_piece;
  run_job(frame, &a->job, read);
  release(&a->job);
  return NULL;
}
