/* Multiplies few rows by a matrix in panels on a CPU, as a custom call of XLA.

   XLA's CPU backend copies the matrix of such a product into another order at each call,
   which takes longer than to multiply it. Here it lies in panels: for 3 vectors of
   columns, those columns of the first input, of the second and so on. A panel is read
   from its first byte to its last, once for every few rows, whose sums stay in
   registers. A sum adds its products in the order of the inputs. The bits of a row
   therefore depend neither on the rows beside it nor on the number of threads.

   Shapes: x [R, D] times panels [N / P, D, P] float32, or [N / P, D / 2, P, 2] bfloat16
   where x is too and D is even. y [R, N] is float32; columns behind N are zero padding.

   library.py builds this file. */

#include "custom_call.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
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

static void run_chunk(Job *job, long chunk, long next) {
  const Product *p = (const Product *)job;
  long panel = chunk * p->panels_a_chunk, end = panel + p->panels_a_chunk;
  if (end > p->num_panels) end = p->num_panels;
  for (; panel < end; panel++) {
    long after = panel + 1 < end || next < 0 ? panel + 1 : next * p->panels_a_chunk;
    if (p->is_bfloat16)
      whole_panel(p, panel, after, 1);
    else
      whole_panel(p, panel, after, 0);
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
