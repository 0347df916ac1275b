/* Multiplies few rows by a matrix in panels on a CPU, as a custom call of XLA.

   XLA's CPU backend copies the matrix of such a product into another order at each call,
   which takes longer than to multiply it. Here it lies in panels: for 3 vectors of
   columns, those columns of the first input, of the second and so on. A panel is read
   from its first byte to its last, once for every few rows, whose sums stay in
   registers. A sum adds its products in the order of the inputs. The bits of a row
   therefore depend neither on the rows beside it nor on the number of threads.

   Shapes: x [R, D] times panels [N / P, D, P] float32, or [N / P, D / 2, P, 2] bfloat16
   where x is too and D is even. y [R, N] is float32; columns behind N are zero padding.

   Where the processor has AMX and the operating system grants it, tiles multiply
   bfloat16. They add in the same order, but round otherwise.

   library.py builds this file. */

#include "custom_call.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__) && !defined(__AVX512F__)
enum { ROWS = 4 }; /* 12 of 16 registers hold sums */
#else
enum { ROWS = 8 }; /* 24 of 32 */
#endif
enum { VECTORS = 3, PANEL = VECTORS * LANES };
enum { CHUNK_BYTES = 1 << 16, AHEAD_BYTES = 3072, LINE_BYTES = 64 };

typedef struct {
  Job job;
  const char *x, *panels;
  float *y;
  long rows, columns;
  long steps; /* inputs in float32, pairs of inputs in bfloat16: 4 bytes each */
  int is_bfloat16;
  long num_panels, panels_a_chunk;
} Product;

const int jaxrl_panel_columns = PANEL;

INLINE Floats spread_word(uint32_t word) {
  float value;
  memcpy(&value, &word, sizeof value);
  return spread(value);
}

/* Adds to the sums what one word of x and one vector of words of the matrix give. */
INLINE Floats add_product(Floats sums, uint32_t x, Words matrix, int is_bfloat16) {
  if (!is_bfloat16) return sums + spread_word(x) * (Floats)matrix;
#if defined(__AVX512BF16__)
  __m512bh pairs = (__m512bh)(x - (Words){0});
  return (Floats)_mm512_dpbf16_ps((__m512)sums, pairs, (__m512bh)matrix);
#else
  sums += spread_word(x << 16) * (Floats)(matrix << 16);
  return sums + spread_word(x & 0xffff0000u) * (Floats)(matrix & 0xffff0000u);
#endif
}

/* What a tile asks the memory for while it computes: at each step so many bytes. */
typedef struct {
  const char *bytes;
  long stride;
} Ahead;

/* Computes one panel's columns of `rows` rows; the last two are constants. */
INLINE void
tile(const Product *p, long row, long panel, Ahead ahead, int rows, int is_bfloat16) {
  const long steps = p->steps;
  const uint32_t *x = (const uint32_t *)p->x + row * steps;
  const char *matrix = p->panels + panel * steps * PANEL * 4;
  Floats sums[ROWS][VECTORS];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = (Floats){0};
  for (long step = 0; step < steps; step++, matrix += PANEL * 4) {
    Words words[VECTORS];
    for (int v = 0; v < VECTORS; v++)
      words[v] = *(const AnyWords *)(matrix + v * 4 * LANES);
    for (long byte = 0; byte < ahead.stride; byte += LINE_BYTES)
      __builtin_prefetch(ahead.bytes + byte);
    ahead.bytes += ahead.stride;
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++)
        sums[r][v] = add_product(sums[r][v], x[r * steps + step], words[v], is_bfloat16);
  }
  long start = panel * PANEL, count = p->columns - start;
  for (int r = 0; r < rows; r++) {
    float *y = p->y + (row + r) * p->columns + start;
    if (count >= PANEL)
      for (int v = 0; v < VECTORS; v++) *(AnyFloats *)(y + v * LANES) = sums[r][v];
    else
      memcpy(y, sums[r], count * 4);
  }
}

/* One tile reads on in its own panel. Several read a panel that is in the cache, and
   together ask for the next one. */
INLINE void whole_panel(const Product *p, long panel, long next, int is_bfloat16) {
  const long bytes = p->steps * PANEL * 4, rest = p->rows % ROWS;
  const long tiles = p->rows / ROWS + (rest >> 2) + (rest >> 1 & 1) + (rest & 1);
  Ahead ahead = {p->panels + panel * bytes + AHEAD_BYTES, PANEL * 4};
  if (tiles > 1)
    ahead = (Ahead){p->panels + next * bytes, (PANEL * 4 + tiles - 1) / tiles};
  const long stride = p->steps * ahead.stride;
  long row = 0;
  for (; row + ROWS <= p->rows; row += ROWS, ahead.bytes += stride)
    tile(p, row, panel, ahead, ROWS, is_bfloat16);
  if (ROWS > 4 && row + 4 <= p->rows) {
    tile(p, row, panel, ahead, 4, is_bfloat16);
    row += 4, ahead.bytes += stride;
  }
  if (row + 2 <= p->rows) {
    tile(p, row, panel, ahead, 2, is_bfloat16);
    row += 2, ahead.bytes += stride;
  }
  if (row < p->rows) tile(p, row, panel, ahead, 1, is_bfloat16);
}

/* Functions of their own: in a larger one, gcc keeps the sums in memory. */
static __attribute__((noinline)) void
panel_of_float32(const Product *p, long panel, long next) {
  whole_panel(p, panel, next, 0);
}

static __attribute__((noinline)) void
panel_of_bfloat16(const Product *p, long panel, long next) {
  whole_panel(p, panel, next, 1);
}

#if defined(HAS_TILES)

/* Tiles have 16 rows of 64 bytes. 0 to 2 are sums, 6 is of x, 7 of the matrix; 3 to 5
   are the sums of 16 more rows, or of the matrix too. */
enum { TILE_ROWS = 16, TILE_STEPS = 16, TILE_BYTES = 64 };

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} TileShapes;

static int may_use_tiles;

/* Linux grants tiles only to processes that ask. */
__attribute__((constructor)) static void ask_for_tiles(void) {
  enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
  may_use_tiles = !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA);
}

/* The compiler does not know that tiles are loaded from memory. */
INLINE void finish_writes(void) { __asm__ volatile("" ::: "memory"); }

static void shape_tiles(int rows) {
  TileShapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shapes.bytes[i] = TILE_BYTES;
    shapes.rows[i] = i < 3 || i == 6 ? rows : TILE_ROWS;
  }
  finish_writes();
  _tile_loadconfig(&shapes);
}

/* Adds what 16 words of each row of x give; `more` rows are 16 others. */
INLINE void add_tiles(
    const char *x, const char *more, long row_bytes, const char *matrix, int has_more) {
  const long stride = PANEL * 4;
  _tile_loadd(6, x, row_bytes);
  _tile_loadd(7, matrix, stride);
  _tile_dpbf16ps(0, 6, 7);
  if (!has_more) {
    _tile_loadd(3, matrix + TILE_BYTES, stride);
    _tile_dpbf16ps(1, 6, 3);
    _tile_loadd(4, matrix + 2 * TILE_BYTES, stride);
    _tile_dpbf16ps(2, 6, 4);
    return;
  }
  _tile_loadd(7, matrix + TILE_BYTES, stride);
  _tile_dpbf16ps(1, 6, 7);
  _tile_loadd(7, matrix + 2 * TILE_BYTES, stride);
  _tile_dpbf16ps(2, 6, 7);
  _tile_loadd(6, more, row_bytes);
  _tile_dpbf16ps(5, 6, 7);
  _tile_loadd(7, matrix + TILE_BYTES, stride);
  _tile_dpbf16ps(4, 6, 7);
  _tile_loadd(7, matrix, stride);
  _tile_dpbf16ps(3, 6, 7);
}

/* Adds the words of x that are left. */
static void add_rest(
    const char *x, long rows, long row_bytes, const char *matrix, long steps, int has_more) {
  char words[2 * TILE_ROWS][TILE_BYTES] = {0}, vectors[TILE_STEPS][PANEL * 4] = {0};
  for (long r = 0; r < rows; r++) memcpy(words[r], x + r * row_bytes, steps * 4);
  memcpy(vectors, matrix, steps * PANEL * 4);
  finish_writes();
  if (has_more)
    add_tiles(*words, words[TILE_ROWS], TILE_BYTES, *vectors, 1);
  else
    add_tiles(*words, NULL, TILE_BYTES, *vectors, 0);
}

/* Stores the sums of `rows` rows, at most `count` columns of them. */
static void store_tiles(const Product *p, long row, long rows, long panel, int has_more) {
  float kept[2 * TILE_ROWS][PANEL], *y = p->y + row * p->columns + panel * PANEL;
  const long count = p->columns - panel * PANEL, is_whole = count >= PANEL;
  float *to = is_whole ? y : *kept;
  const long floats = is_whole ? p->columns : PANEL, stride = floats * 4;
  _tile_stored(0, to, stride);
  _tile_stored(1, to + LANES, stride);
  _tile_stored(2, to + 2 * LANES, stride);
  if (has_more) {
    to += TILE_ROWS * floats;
    _tile_stored(3, to, stride);
    _tile_stored(4, to + LANES, stride);
    _tile_stored(5, to + 2 * LANES, stride);
  }
  for (long r = 0; !is_whole && r < rows; r++)
    memcpy(y + r * p->columns, kept[r], count * 4);
}

/* Computes one panel's columns of 32 rows, or of at most 16. */
INLINE void tile_block(
    const Product *p, long row, long rows, long panel, Ahead ahead, int has_more) {
  const long row_bytes = p->steps * 4;
  const char *x = p->x + row * row_bytes, *more = x + TILE_ROWS * row_bytes;
  const char *matrix = p->panels + panel * p->steps * PANEL * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  if (has_more) {
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
  }
  long step = 0;
  for (; step + TILE_STEPS <= p->steps; step += TILE_STEPS) {
    for (long byte = 0; byte < TILE_STEPS * ahead.stride; byte += LINE_BYTES)
      __builtin_prefetch(ahead.bytes + byte);
    ahead.bytes += TILE_STEPS * ahead.stride;
    add_tiles(x + step * 4, more + step * 4, row_bytes, matrix, has_more);
    matrix += TILE_STEPS * PANEL * 4;
  }
  if (step < p->steps)
    add_rest(x + step * 4, rows, row_bytes, matrix, p->steps - step, has_more);
  store_tiles(p, row, rows, panel, has_more);
}

static void tile_panel(const Product *p, long panel, long next, int *shape) {
  const long bytes = p->steps * PANEL * 4;
  const long blocks = p->rows / (2 * TILE_ROWS) + (p->rows >> 4 & 1) + (p->rows % 16 > 0);
  Ahead ahead = {p->panels + panel * bytes + AHEAD_BYTES, PANEL * 4};
  if (blocks > 1)
    ahead = (Ahead){p->panels + next * bytes, (PANEL * 4 + blocks - 1) / blocks};
  for (long row = 0, rows; row < p->rows; row += rows) {
    const long left = p->rows - row;
    rows = left >= 2 * TILE_ROWS ? 2 * TILE_ROWS : left < TILE_ROWS ? left : TILE_ROWS;
    const int wanted = rows < TILE_ROWS ? rows : TILE_ROWS;
    if (*shape != wanted) shape_tiles(*shape = wanted);
    if (rows > TILE_ROWS)
      tile_block(p, row, rows, panel, ahead, 1);
    else
      tile_block(p, row, rows, panel, ahead, 0);
    ahead.bytes += p->steps * ahead.stride;
  }
}

static void run_tiles(const Product *p, long panel, long end, long next) {
  int shape = 0;
  for (; panel < end; panel++)
    tile_panel(p, panel, panel + 1 < end || next < 0 ? panel + 1 : next, &shape);
  _tile_release(); /* what is in use is saved whenever threads change */
}

#endif

static void run_chunk(Job *job, long chunk, long next) {
  const Product *p = (const Product *)job;
  long panel = chunk * p->panels_a_chunk, end = panel + p->panels_a_chunk;
  if (end > p->num_panels) end = p->num_panels;
#if defined(HAS_TILES)
  if (p->is_bfloat16 && may_use_tiles)
    return run_tiles(p, panel, end, next < 0 ? next : next * p->panels_a_chunk);
#endif
  for (; panel < end; panel++) {
    long after = panel + 1 < end || next < 0 ? panel + 1 : next * p->panels_a_chunk;
    if (p->is_bfloat16)
      panel_of_bfloat16(p, panel, after);
    else
      panel_of_float32(p, panel, after);
  }
}

static int has_shapes(
    const XLA_FFI_Buffer *x, const XLA_FFI_Buffer *panels, const XLA_FFI_Buffer *y) {
  int is_bfloat16 = panels->dtype == XLA_FFI_DataType_BF16;
  const int64_t *sizes = panels->dims;
  if (x->rank != 2 || y->rank != 2 || panels->rank != (is_bfloat16 ? 4 : 3)) return 0;
  if (x->dtype != panels->dtype || y->dtype != XLA_FFI_DataType_F32) return 0;
  if (!is_bfloat16 && panels->dtype != XLA_FFI_DataType_F32) return 0;
  if (sizes[2] != PANEL || (is_bfloat16 && sizes[3] != 2)) return 0;
  if (x->dims[1] != sizes[1] * (is_bfloat16 ? 2 : 1)) return 0;
  return y->dims[0] == x->dims[0] && (y->dims[1] + PANEL - 1) / PANEL == sizes[0];
}

XLA_FFI_Error *jaxrl_row_product(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  if (frame->args.size != 2 || frame->rets.size != 1)
    return fail(frame, "jaxrl_row_product takes two arrays and returns one");
  const XLA_FFI_Buffer *x = frame->args.args[0], *panels = frame->args.args[1];
  const XLA_FFI_Buffer *y = frame->rets.rets[0];
  if (!has_shapes(x, panels, y))
    return fail(frame, "jaxrl_row_product: shapes or types do not fit together");
  Product *p = calloc(1, sizeof *p);
  if (!p) return fail(frame, "jaxrl_row_product: out of memory");
  p->x = x->data, p->panels = panels->data, p->y = y->data;
  p->rows = x->dims[0], p->columns = y->dims[1], p->steps = panels->dims[1];
  p->is_bfloat16 = panels->dtype == XLA_FFI_DataType_BF16;
  p->num_panels = panels->dims[0];
  long blocks = (p->rows + ROWS - 1) / ROWS;
  p->panels_a_chunk = CHUNK_BYTES / (p->steps * PANEL * 4 * blocks + 1) + 1;
  p->job.run = run_chunk;
  p->job.num_chunks = (p->num_panels + p->panels_a_chunk - 1) / p->panels_a_chunk;
  run_job(frame, &p->job, p->num_panels * p->steps * PANEL * 4 * blocks);
  release(&p->job);
  return NULL;
}
