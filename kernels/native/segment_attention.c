/* Computes causal attention within the segments of rows, and its gradients, as custom
   calls of XLA.

   XLA's CPU backend computes and keeps the scores of all pairs of a row, or needs the
   row taken apart into its sequences. Here some queries at a time meet only the blocks
   of keys that one of them may see, and for the gradients the weights are computed
   again. A row and a head of keys are one piece of work, which adds in the order of its
   queries: the bits depend neither on other rows nor on the number of threads.

   Shapes: q [B, T, H, D], k and v [B, T, K, D], out as q, all float32; the segments of
   tokens, of which 0 is padding, and the earlier segments that they also see, both
   [B, T] int32; scale []. D is a multiple of LANES. stats [B, H, T, 2] float32 are the
   largest score of a query and 1 over the sum of its weights. Padding gets zeros.

   library.py builds this file. */

#include "custom_call.h"

#if defined(__x86_64__) && !defined(__AVX512F__)
enum { QUERIES = 4, WIDE = 2 }; /* 8 of 16 registers hold sums */
#else
enum { QUERIES = 8, WIDE = 4 }; /* 16 of 32 */
#endif
enum { FEW = 4 /* rows whose sums are in registers at once */ };
enum { MOST_WIDTH = 512, STATS = 2, PARTS = 2, LINE_BYTES = 64 };

#define NEGATIVE -1e30f
#define APART static __attribute__((noinline)) /* gcc then keeps sums in registers */

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef Ints AnyInts __attribute__((aligned(4), may_alias));

typedef struct {
  Job job;
  const float *q, *k, *v, *of_out, *stats;
  const int32_t *segments, *prefixes;
  float *new_out, *new_stats, *of_q, *of_k, *of_v;
  long length, heads, kv_heads, width, parts;
  float scale;
  char *scratch; /* so many bytes for each chunk: pages of malloc would come and go */
  size_t scratch_bytes;
} Attention;

/* A block of LANES keys of which a tile sees some, from `first` to before `end`. */
typedef struct {
  long block;
  int first, end;
} Seen;

typedef float Block[QUERIES][LANES];

/* The keys of a row and a head, and what is computed with them. A block's panel has the
   first number of each of its keys, then the second and so on. */
typedef struct {
  long row, kv_head, group;        /* as many heads of queries share these keys */
  const float *keys, *values;      /* of the row and head */
  long key_stride, query_stride;   /* from one to the next */
  float *key_panels, *value_panels;
  float *of_keys, *of_values;      /* [whole blocks of keys][width] */
  int32_t *segments;               /* padded to whole blocks */
  int32_t (*span)[2];              /* the least and the last segment of each block */
  const float **rows, **of_rows;   /* q, and of_out, of the tile's queries, by head */
  Seen *blocks;
  long num_blocks, most_blocks;
  Block *weights, *of_scores;      /* [head][block of the tile] */
} Piece;

/* Some queries, one after the other. Of a tile with fewer the last is repeated. */
typedef struct {
  long start, count;
  int32_t segment[QUERIES], prefix[QUERIES];
} Tile;

static void transpose(
    const float *rows, long stride, long count, long width, float *panels) {
  for (long first = 0; first < count; first += LANES, panels += width * LANES) {
    long keys = count - first < LANES ? count - first : LANES;
    if (keys < LANES) memset(panels, 0, width * LANES * 4);
    for (long i = 0; i < keys; i++)
      for (long d = 0; d < width; d++)
        panels[d * LANES + i] = rows[(first + i) * stride + d];
  }
}

/* Takes some bytes of a piece's scratch memory, in whole cache lines. */
static void *take(char **scratch, size_t bytes) {
  void *taken = *scratch;
  *scratch += (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
  return taken;
}

/* Shares out the scratch memory of a piece; returns how much of it is needed. */
static size_t share_out(const Attention *a, Piece *p, char *scratch) {
  char *start = scratch;
  const long blocks = p->most_blocks = (a->length + LANES - 1) / LANES;
  const long group = p->group = a->heads / a->kv_heads, queries = group * QUERIES;
  const size_t keys = (size_t)blocks * LANES * a->width * 4;
  p->key_panels = take(&scratch, keys);
  p->segments = take(&scratch, blocks * LANES * sizeof *p->segments);
  p->span = take(&scratch, blocks * sizeof *p->span);
  p->rows = take(&scratch, queries * sizeof *p->rows);
  p->blocks = take(&scratch, blocks * sizeof *p->blocks);
  p->weights = take(&scratch, group * blocks * sizeof *p->weights);
  if (a->of_q) {
    p->value_panels = take(&scratch, keys);
    p->of_keys = take(&scratch, keys), p->of_values = take(&scratch, keys);
    p->of_rows = take(&scratch, queries * sizeof *p->of_rows);
    p->of_scores = take(&scratch, group * blocks * sizeof *p->of_scores);
  }
  return scratch - start;
}

/* Reads the keys of a row and a head. */
static void
begin_piece(const Attention *a, Piece *p, long row, long kv_head, char *scratch) {
  const long width = a->width;
  *p = (Piece){.row = row, .kv_head = kv_head};
  share_out(a, p, scratch);
  p->key_stride = a->kv_heads * width, p->query_stride = a->heads * width;
  const long at = row * a->length * p->key_stride + kv_head * width;
  p->keys = a->k + at, p->values = a->v + at;
  transpose(p->keys, p->key_stride, a->length, width, p->key_panels);
  if (a->of_q) {
    transpose(p->values, p->key_stride, a->length, width, p->value_panels);
    memset(p->of_keys, 0, p->most_blocks * LANES * width * 4);
    memset(p->of_values, 0, p->most_blocks * LANES * width * 4);
  }
  const long padded = p->most_blocks * LANES;
  memcpy(p->segments, a->segments + row * a->length, a->length * sizeof *p->segments);
  for (long i = a->length; i < padded; i++) p->segments[i] = 0;
  for (long b = 0; b < p->most_blocks; b++) {
    const int32_t *ids = p->segments + b * LANES;
    int32_t least = ids[0], last = ids[0];
    for (int i = 1; i < LANES; i++) {
      least = ids[i] < least ? ids[i] : least;
      last = ids[i] > last ? ids[i] : last;
    }
    p->span[b][0] = least, p->span[b][1] = last;
  }
}

INLINE int is_within(int32_t id, const int32_t span[2]) {
  return span[0] <= id && id <= span[1];
}

/* Finds the keys of a block that a query sees, were they all before it. */
static void see(const Piece *p, const Tile *t, long block) {
  Seen *seen = p->blocks + p->num_blocks;
  const int32_t *ids = p->segments + block * LANES;
  *seen = (Seen){.block = block, .first = LANES, .end = 0};
  for (int i = 0; i < QUERIES; i++) {
    if (i && t->segment[i] == t->segment[i - 1] && t->prefix[i] == t->prefix[i - 1])
      continue;
    for (int lane = 0; lane < LANES; lane++)
      if (ids[lane] == t->segment[i] || ids[lane] == t->prefix[i]) {
        if (lane < seen->first) seen->first = lane;
        if (lane >= seen->end) seen->end = lane + 1;
      }
  }
  const long last = t->start + t->count - block * LANES;
  if (last < seen->end) seen->end = last;
}

/* Begins with some queries, and finds the blocks that one of them sees. */
static void begin_tile(const Attention *a, Piece *p, Tile *t, long start) {
  const long left = a->length - start, first = p->row * a->length;
  t->start = start, t->count = left < QUERIES ? left : QUERIES;
  for (long i = 0; i < QUERIES; i++) {
    const long at = start + (i < t->count ? i : t->count - 1);
    t->segment[i] = p->segments[at];
    if (t->segment[i] <= 0) t->segment[i] = -1; /* which no key has */
    const int32_t prefix = a->prefixes[first + at];
    t->prefix[i] = prefix > 0 && t->segment[i] > 0 ? prefix : t->segment[i];
    for (long g = 0; g < p->group; g++) {
      const long place = (first + at) * p->query_stride +
                         (p->kv_head * p->group + g) * a->width;
      p->rows[g * QUERIES + i] = a->q + place;
      if (a->of_q) p->of_rows[g * QUERIES + i] = a->of_out + place;
    }
  }
  p->num_blocks = 0;
  for (long b = 0; b * LANES < start + t->count; b++)
    for (int i = 0; i < QUERIES; i++) {
      if (i && t->segment[i] == t->segment[i - 1] && t->prefix[i] == t->prefix[i - 1])
        continue;
      if (is_within(t->segment[i], p->span[b]) || is_within(t->prefix[i], p->span[b])) {
        see(p, t, b);
        p->num_blocks += p->blocks[p->num_blocks].first < p->blocks[p->num_blocks].end;
        break;
      }
    }
}

/* Multiplies rows by one panel or two. */
INLINE void multiply(
    const float *const rows[QUERIES], const float *one, const float *two, long width,
    Block *out, int panels) {
  const float *x[QUERIES];
  Floats sums[QUERIES][2];
  for (int i = 0; i < QUERIES; i++) {
    x[i] = rows[i];
    for (int j = 0; j < panels; j++) sums[i][j] = (Floats){0};
  }
  for (long d = 0; d < width; d++) {
    Floats column = *(const AnyFloats *)(one + d * LANES), other = column;
    if (panels > 1) other = *(const AnyFloats *)(two + d * LANES);
    for (int i = 0; i < QUERIES; i++) {
      Floats value = spread(x[i][d]);
      sums[i][0] += value * column;
      if (panels > 1) sums[i][1] += value * other;
    }
  }
  for (int j = 0; j < panels; j++)
    for (int i = 0; i < QUERIES; i++) *(AnyFloats *)out[j][i] = sums[i][j];
}

APART void multiply_two(
    const float *const rows[QUERIES], const float *one, const float *two, long width,
    Block *out) {
  multiply(rows, one, two, width, out, 2);
}

APART void multiply_one(
    const float *const rows[QUERIES], const float *one, long width, Block *out) {
  multiply(rows, one, one, width, out, 1);
}

/* Multiplies the rows of all heads by the panels of all blocks of a tile. */
static void multiply_blocks(
    const Piece *p, const float *const *rows, const float *panels, long width,
    Block *out) {
  const long size = width * LANES;
  for (long j = 0; j < p->num_blocks; j += 2) {
    const float *one = panels + p->blocks[j].block * size;
    const int has_two = j + 1 < p->num_blocks;
    const float *two = has_two ? panels + p->blocks[j + 1].block * size : one;
    for (long g = 0; g < p->group; g++) {
      Block *to = out + g * p->most_blocks + j;
      if (has_two)
        multiply_two(rows + g * QUERIES, one, two, width, to);
      else
        multiply_one(rows + g * QUERIES, one, width, to);
    }
  }
}

/* All bits where a query sees a key of a block. */
INLINE Words seen(const Piece *p, const Tile *t, long block, int i) {
  Ints place, ids = *(const AnyInts *)(p->segments + block * LANES);
  for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
  Ints segment = t->segment[i] - (Ints){0}, prefix = t->prefix[i] - (Ints){0};
  Ints last = (int32_t)(t->start + i - block * LANES) - (Ints){0};
  return (Words)(((ids == segment) | (ids == prefix)) & (place <= last));
}

/* Whether all queries see all keys of a block. */
INLINE int sees_all(const Piece *p, const Tile *t, long block) {
  const int32_t *span = p->span[block];
  int all = span[0] == span[1] && (block + 1) * LANES <= t->start + 1;
  for (int i = 0; i < QUERIES; i++)
    all &= t->segment[i] == span[0] || t->prefix[i] == span[0];
  return all;
}

/* Computes scores, scaled, and those that are not seen far below all others. */
static void score(const Attention *a, const Piece *p, const Tile *t) {
  multiply_blocks(p, p->rows, p->key_panels, a->width, p->weights);
  const Floats scale = spread(a->scale);
  const Words far = (Words)spread(NEGATIVE);
  for (long j = 0; j < p->num_blocks; j++) {
    const long block = p->blocks[j].block;
    const int all = sees_all(p, t, block);
    for (int i = 0; i < QUERIES; i++) {
      const Words mask = all ? ~(Words){0} : seen(p, t, block, i);
      for (long g = 0; g < p->group; g++) {
        AnyFloats *part = (AnyFloats *)p->weights[g * p->most_blocks + j][i];
        Words scaled = (Words)(*part * scale);
        *part = (Floats)((scaled & mask) | (far & ~mask));
      }
    }
  }
}

/* Sums the rows of all blocks with the weights of FEW queries, `vectors` at a time. */
INLINE void mix(
    const Piece *p, const float *weights, const float *rows, long stride,
    float *const out[FEW], int vectors) {
  Floats sums[FEW][WIDE];
  for (int i = 0; i < FEW; i++)
    for (int v = 0; v < vectors; v++) sums[i][v] = (Floats){0};
  for (long j = 0; j < p->num_blocks; j++, weights += QUERIES * LANES) {
    const Seen seen = p->blocks[j];
    const float *row = rows + (seen.block * LANES + seen.first) * stride;
    for (long key = seen.first; key < seen.end; key++, row += stride) {
      Floats part[WIDE];
      for (int v = 0; v < vectors; v++) part[v] = *(const AnyFloats *)(row + v * LANES);
      for (int i = 0; i < FEW; i++) {
        Floats weight = spread(weights[i * LANES + key]);
        for (int v = 0; v < vectors; v++) sums[i][v] += weight * part[v];
      }
    }
  }
  for (int i = 0; i < FEW; i++)
    for (int v = 0; v < vectors; v++) *(AnyFloats *)(out[i] + v * LANES) = sums[i][v];
}

APART void mix_wide(
    const Piece *p, const float *weights, const float *rows, long stride,
    float *const out[FEW]) {
  mix(p, weights, rows, stride, out, WIDE);
}

APART void mix_narrow(
    const Piece *p, const float *weights, const float *rows, long stride,
    float *const out[FEW]) {
  mix(p, weights, rows, stride, out, 1);
}

/* out [QUERIES][width] = weights · rows */
static void mix_rows(
    const Piece *p, const Block *blocks, const float *rows, long stride, long width,
    float *out) {
  const float *weights = **blocks;
  for (int first = 0; first < QUERIES; first += FEW) {
    float *to[FEW];
    for (int i = 0; i < FEW; i++) to[i] = out + (first + i) * width;
    long d = 0;
    for (; d + WIDE * LANES <= width; d += WIDE * LANES) {
      mix_wide(p, weights + first * LANES, rows + d, stride, to);
      for (int i = 0; i < FEW; i++) to[i] += WIDE * LANES;
    }
    for (; d < width; d += LANES) {
      mix_narrow(p, weights + first * LANES, rows + d, stride, to);
      for (int i = 0; i < FEW; i++) to[i] += LANES;
    }
  }
}

/* Makes weights of a head's scores, and writes down what the backward pass needs. */
static void weigh(
    const Attention *a, const Piece *p, const Tile *t, long head, Block *scores,
    float inverse[QUERIES]) {
  for (long i = 0; i < QUERIES; i++) {
    Floats most = spread(NEGATIVE), sums = {0};
    for (long j = 0; j < p->num_blocks; j++) {
      Floats part = *(AnyFloats *)scores[j][i];
      Words is_more = (Words)(part > most);
      most = (Floats)(((Words)part & is_more) | ((Words)most & ~is_more));
    }
    float top = most[0];
    for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
    for (long j = 0; j < p->num_blocks; j++) {
      AnyFloats *part = (AnyFloats *)scores[j][i];
      sums += *part = exponential(*part - spread(top));
    }
    inverse[i] = t->segment[i] > 0 ? 1 / sum_of_lanes(sums) : 0;
    if (i >= t->count) continue;
    float *stats = a->new_stats;
    stats += ((p->row * a->heads + head) * a->length + t->start + i) * STATS;
    stats[0] = top, stats[1] = inverse[i];
  }
}

static void forward_tile(const Attention *a, Piece *p, long start) {
  Tile tile, *t = &tile;
  float out[QUERIES * MOST_WIDTH], inverse[QUERIES];
  begin_tile(a, p, t, start);
  score(a, p, t);
  for (long g = 0; g < p->group; g++) {
    const float *const *rows = p->rows + g * QUERIES;
    Block *weights = p->weights + g * p->most_blocks;
    weigh(a, p, t, p->kv_head * p->group + g, weights, inverse);
    mix_rows(p, weights, p->values, p->key_stride, a->width, out);
    for (long i = 0; i < t->count; i++) {
      float *to = a->new_out + (rows[i] - a->q);
      for (long d = 0; d < a->width; d++)
        to[d] = inverse[i] ? out[i * a->width + d] * inverse[i] : 0;
    }
  }
}

/* Adds to FEW rows of sums what the queries of all heads give with their weights. */
INLINE void add_rows(
    const float *weights, long head_weights, const float *const *rows, long group, long d,
    float *to, long stride, int vectors) {
  Floats sums[FEW][WIDE];
  for (int key = 0; key < FEW; key++)
    for (int v = 0; v < vectors; v++)
      sums[key][v] = *(AnyFloats *)(to + key * stride + v * LANES);
  for (long g = 0; g < group; g++, weights += head_weights, rows += QUERIES)
    for (int i = 0; i < QUERIES; i++) {
      Floats part[WIDE];
      for (int v = 0; v < vectors; v++)
        part[v] = *(const AnyFloats *)(rows[i] + d + v * LANES);
      for (int key = 0; key < FEW; key++) {
        Floats weight = spread(weights[i * LANES + key]);
        for (int v = 0; v < vectors; v++) sums[key][v] += weight * part[v];
      }
    }
  for (int key = 0; key < FEW; key++)
    for (int v = 0; v < vectors; v++)
      *(AnyFloats *)(to + key * stride + v * LANES) = sums[key][v];
}

APART void add_wide(
    const float *weights, long head_weights, const float *const *rows, long group, long d,
    float *to, long stride) {
  add_rows(weights, head_weights, rows, group, d, to, stride, WIDE);
}

APART void add_narrow(
    const float *weights, long head_weights, const float *const *rows, long group, long d,
    float *to, long stride) {
  add_rows(weights, head_weights, rows, group, d, to, stride, 1);
}

/* Adds the rows of a tile's queries to the gradients of all keys that they see. */
static void add_to_keys(
    const Piece *p, const Block *weights, const float *const *rows, long width,
    float *to) {
  const long head_weights = p->most_blocks * QUERIES * LANES;
  for (long j = 0; j < p->num_blocks; j++) {
    const Seen seen = p->blocks[j];
    for (long key = seen.first / FEW * FEW; key < seen.end; key += FEW) {
      float *first = to + (seen.block * LANES + key) * width;
      long d = 0;
      for (; d + WIDE * LANES <= width; d += WIDE * LANES)
        add_wide(**weights + j * QUERIES * LANES + key, head_weights, rows, p->group, d,
                 first + d, width);
      for (; d < width; d += LANES)
        add_narrow(**weights + j * QUERIES * LANES + key, head_weights, rows, p->group, d,
                   first + d, width);
    }
  }
}

/* Makes weights of a head's scores, and gradients of scores of those of weights. */
static void differentiate(const Attention *a, const Piece *p, const Tile *t, long g) {
  Block *weights = p->weights + g * p->most_blocks;
  Block *of_scores = p->of_scores + g * p->most_blocks;
  const float *stats = a->stats;
  const long head = p->kv_head * p->group + g;
  stats += ((p->row * a->heads + head) * a->length + t->start) * STATS;
  for (long i = 0; i < QUERIES; i++) {
    const int is_query = i < t->count; /* others repeat the last one, without weight */
    const float *own = stats + (is_query ? i : t->count - 1) * STATS;
    const Floats top = spread(own[0]), inverse = spread(is_query ? own[1] : 0);
    Floats sums = {0};
    for (long j = 0; j < p->num_blocks; j++) {
      AnyFloats *weight = (AnyFloats *)weights[j][i];
      *weight = exponential(*weight - top) * inverse;
      sums += *weight * *(const AnyFloats *)of_scores[j][i];
    }
    const Floats mean = spread(sum_of_lanes(sums));
    for (long j = 0; j < p->num_blocks; j++) {
      AnyFloats *of_score = (AnyFloats *)of_scores[j][i];
      *of_score = (*of_score - mean) * *(const AnyFloats *)weights[j][i] * spread(a->scale);
    }
  }
}

static void backward_tile(const Attention *a, Piece *p, long start) {
  Tile tile, *t = &tile;
  float of_q[QUERIES * MOST_WIDTH];
  begin_tile(a, p, t, start);
  score(a, p, t);
  multiply_blocks(p, p->of_rows, p->value_panels, a->width, p->of_scores);
  for (long g = 0; g < p->group; g++) differentiate(a, p, t, g);
  for (long g = 0; g < p->group; g++) {
    mix_rows(p, p->of_scores + g * p->most_blocks, p->keys, p->key_stride, a->width, of_q);
    for (long i = 0; i < t->count; i++)
      memcpy(a->of_q + (p->rows[g * QUERIES + i] - a->q), of_q + i * a->width,
             a->width * 4);
  }
  add_to_keys(p, p->weights, p->of_rows, a->width, p->of_values);
  add_to_keys(p, p->of_scores, p->rows, a->width, p->of_keys);
}

static void run_piece(Job *job, long chunk, long next) {
  (void)next;
  Attention *a = (Attention *)job;
  const long part = chunk % a->parts, pair = chunk / a->parts, width = a->width;
  const long row = pair / a->kv_heads, kv_head = pair % a->kv_heads;
  Piece piece, *p = &piece;
  begin_piece(a, p, row, kv_head, a->scratch + chunk * a->scratch_bytes);
  for (long start = part * QUERIES; start < a->length; start += a->parts * QUERIES) {
    if (a->of_q)
      backward_tile(a, p, start);
    else
      forward_tile(a, p, start);
  }
  for (long token = 0; a->of_q && token < a->length; token++) {
    const long at = (row * a->length + token) * p->key_stride + kv_head * width;
    memcpy(a->of_k + at, p->of_keys + token * width, width * 4);
    memcpy(a->of_v + at, p->of_values + token * width, width * 4);
  }
}

static int has_shape(
    const XLA_FFI_Buffer *x, XLA_FFI_DataType type, int64_t rank, const int64_t *sizes) {
  if (x->rank != rank || x->dtype != type) return 0;
  for (int64_t i = 0; i < rank; i++)
    if (x->dims[i] != sizes[i]) return 0;
  return 1;
}

/* Arguments: q, k, v, segments, prefixes, scale; then stats and the gradient of out.
   Results: out and stats; or the gradients of q, k and v. The last result is scratch
   memory, [chunks, …]. */
static XLA_FFI_Error *attend(XLA_FFI_CallFrame *frame, int has_gradients) {
  if (tells_version(frame)) return NULL;
  const int64_t num_args = has_gradients ? 8 : 6, num_rets = has_gradients ? 4 : 3;
  if (frame->args.size != num_args || frame->rets.size != num_rets)
    return fail(frame, "jaxrl_attention: other arrays than it takes");
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  XLA_FFI_Buffer **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  if (args[0]->rank != 4 || args[1]->rank != 4)
    return fail(frame, "jaxrl_attention: q and k need four axes");
  const int64_t *sizes = args[0]->dims, kv_heads = args[1]->dims[2];
  const int64_t keys[] = {sizes[0], sizes[1], kv_heads, sizes[3]};
  const int64_t stats[] = {sizes[0], sizes[2], sizes[1], STATS};
  const XLA_FFI_DataType f32 = XLA_FFI_DataType_F32, s32 = XLA_FFI_DataType_S32;
  int fits = has_shape(args[0], f32, 4, sizes) && has_shape(args[1], f32, 4, keys);
  fits = fits && has_shape(args[2], f32, 4, keys) && has_shape(args[3], s32, 2, sizes);
  fits = fits && has_shape(args[4], s32, 2, sizes) && has_shape(args[5], f32, 0, sizes);
  fits = fits && has_shape(rets[0], f32, 4, sizes);
  if (has_gradients) {
    fits = fits && has_shape(args[6], f32, 4, stats) && has_shape(args[7], f32, 4, sizes);
    fits = fits && has_shape(rets[1], f32, 4, keys) && has_shape(rets[2], f32, 4, keys);
  } else {
    fits = fits && has_shape(rets[1], f32, 4, stats);
  }
  fits = fits && sizes[3] % LANES == 0 && sizes[3] <= MOST_WIDTH;
  if (!fits || !kv_heads || sizes[2] % kv_heads)
    return fail(frame, "jaxrl_attention: shapes or types do not fit together");
  Attention *a = calloc(1, sizeof *a);
  if (!a) return fail(frame, "jaxrl_attention: out of memory");
  a->q = args[0]->data, a->k = args[1]->data, a->v = args[2]->data;
  a->segments = args[3]->data, a->prefixes = args[4]->data;
  a->scale = *(const float *)args[5]->data;
  a->length = sizes[1], a->heads = sizes[2], a->kv_heads = kv_heads, a->width = sizes[3];
  if (has_gradients) {
    a->stats = args[6]->data, a->of_out = args[7]->data;
    a->of_q = rets[0]->data, a->of_k = rets[1]->data, a->of_v = rets[2]->data;
  } else {
    a->new_out = rets[0]->data, a->new_stats = rets[1]->data;
  }
  a->parts = has_gradients ? 1 : PARTS; /* the sums of gradients are whole */
  a->job.run = run_piece;
  a->job.num_chunks = sizes[0] * kv_heads * a->parts;
  const XLA_FFI_Buffer *scratch = rets[num_rets - 1];
  int is_enough = scratch->rank == 2 && scratch->dtype == f32;
  if (is_enough) {
    Piece piece = {0};
    a->scratch = scratch->data, a->scratch_bytes = scratch->dims[1] * 4;
    is_enough = scratch->dims[0] == a->job.num_chunks &&
                share_out(a, &piece, NULL) <= a->scratch_bytes;
  }
  if (!is_enough) {
    free(a);
    return fail(frame, "jaxrl_attention: too little scratch memory");
  }
  run_job(frame, &a->job, sizes[0] * sizes[1] * sizes[2] * sizes[3] * 4);
  release(&a->job);
  return NULL;
}

XLA_FFI_Error *jaxrl_attention(XLA_FFI_CallFrame *frame) { return attend(frame, 0); }

XLA_FFI_Error *jaxrl_attention_back(XLA_FFI_CallFrame *frame) { return attend(frame, 1); }
