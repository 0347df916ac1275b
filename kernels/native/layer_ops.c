/* What lies between the products of a layer, on a CPU, as custom calls of XLA: the RMS
   norm, and the gated activation of an MLP, with their gradients.

   XLA's CPU backend computes a norm in several passes, some of which depend on how rows
   are arranged: a sum over [1, T, D] takes four times as long as one over [2, T/2, D].
   It also keeps for the backward pass what it was told to compute again. Here each of
   them is one pass, and the backward pass computes anew what it needs.

   Shapes, all float32:
   - norm: x [N, D] and scale [D] make y [N, D] = scale · x / √(mean x² + ε).
   - its gradient: x, scale and dy [N, D] make dx [N, D], and of the scale [P, D], sums
     over as many rows as `rows_of_sum` says. dx may lie where dy does.
   - gate: gate and up [N, W], or both side by side [N, 2·W], make f(gate) · up [N, W].
   - its gradient: gate, up and the gradient of the product make the gradients of gate and
     up, and the product once more. They may lie where the arguments do.

   f(g) is g · s(z) with the logistic function s: SiLU has z = g, and GELU by tanh has
   z = 2·√(2/π)·(g + 0.044715·g³).

   library.py builds this file. */

#include <math.h>

#include "custom_call.h"

enum { CHUNK_FLOATS = 1 << 14 /* that a thread takes at a time */ };

typedef struct {
  Job job;
  const float *x, *scale, *dy;
  float *y, *dx, *of_scale;
  long rows, width, rows_a_chunk;
  float epsilon;
} Norm;

typedef struct {
  Job job;
  const float *gate, *up, *slope;
  float *product, *of_gate, *of_up;
  long rows, width, stride, rows_a_chunk; /* stride: from one row of gate to the next */
} Gate;

INLINE Floats load(const float *x, long count) {
  if (count >= LANES) return *(const AnyFloats *)x;
  Floats values = {0};
  memcpy(&values, x, count * sizeof *x);
  return values;
}

static long rows_of_sum(long width) { return CHUNK_FLOATS / (width + 1) + 1; }

INLINE float inverse_of(const Norm *n, const float *x) {
  Floats sum = {0};
  for (long i = 0; i < n->width; i += LANES) {
    Floats one = load(x + i, n->width - i);
    sum += one * one;
  }
  return 1 / sqrtf(sum_of_lanes(sum) / (float)n->width + n->epsilon);
}

static void norm_rows(Job *job, long chunk, long next) {
  (void)next;
  const Norm *n = (const Norm *)job;
  long row = chunk * n->rows_a_chunk, end = row + n->rows_a_chunk;
  for (; row < end && row < n->rows; row++) {
    const float *x = n->x + row * n->width;
    float *y = n->y + row * n->width, inverse = inverse_of(n, x);
    for (long i = 0; i < n->width; i += LANES) {
      long count = n->width - i;
      store(y + i, load(n->scale + i, count) * (load(x + i, count) * inverse), count);
    }
  }
}

/* With g = scale · dy, dx is (g − x · mean(g · x) / mean(x²)) / √mean(x²). */
static void norm_rows_back(Job *job, long chunk, long next) {
  (void)next;
  const Norm *n = (const Norm *)job;
  float *of_scale = n->of_scale + chunk * n->width;
  memset(of_scale, 0, n->width * sizeof *of_scale);
  long row = chunk * n->rows_a_chunk, end = row + n->rows_a_chunk;
  for (; row < end && row < n->rows; row++) {
    const float *x = n->x + row * n->width, *dy = n->dy + row * n->width;
    float *dx = n->dx + row * n->width, inverse = inverse_of(n, x);
    Floats sum = {0};
    for (long i = 0; i < n->width; i += LANES) {
      long count = n->width - i;
      Floats slope = load(dy + i, count), own = load(x + i, count);
      sum += load(n->scale + i, count) * slope * own;
      store(of_scale + i, load(of_scale + i, count) + slope * (own * inverse), count);
    }
    float mean = sum_of_lanes(sum) / (float)n->width * inverse * inverse;
    for (long i = 0; i < n->width; i += LANES) {
      long count = n->width - i;
      Floats g = load(n->scale + i, count) * load(dy + i, count);
      store(dx + i, (g - load(x + i, count) * mean) * inverse, count);
    }
  }
}

typedef struct {
  Floats value, slope;
} Activation;

INLINE Activation activate(Floats g, int is_gelu) {
  Floats z = g, inner = spread(1);
  if (is_gelu) {
    const float factor = 1.5957691216057308f, cubic = 0.044715f;
    z = factor * (g + cubic * g * g * g);
    inner = factor * (1 + 3 * cubic * g * g);
  }
  Floats small = exponential((Floats)((Words)z | 0x80000000u)); /* e^−|z| */
  Floats high = 1 / (1 + small), low = small * high;
  Words is_low = (Words)(z < spread(0));
  Floats s = (Floats)(((Words)low & is_low) | ((Words)high & ~is_low));
  Floats rest = (Floats)(((Words)high & is_low) | ((Words)low & ~is_low));
  return (Activation){g * s, s + g * s * rest * inner};
}

INLINE void gate_rows(Job *job, long chunk, int is_gelu, int is_backward) {
  const Gate *p = (const Gate *)job;
  long row = chunk * p->rows_a_chunk, end = row + p->rows_a_chunk;
  for (; row < end && row < p->rows; row++)
    for (long i = 0; i < p->width; i += LANES) {
      long count = p->width - i, at = row * p->width + i, from = row * p->stride + i;
      Floats up = load(p->up + from, count);
      Activation f = activate(load(p->gate + from, count), is_gelu);
      if (is_backward) {
        Floats slope = load(p->slope + at, count);
        store(p->of_gate + at, slope * up * f.slope, count);
        store(p->of_up + at, slope * f.value, count);
      }
      store(p->product + at, f.value * up, count);
    }
}

static void silu_rows(Job *job, long chunk, long next) {
  (void)next;
  gate_rows(job, chunk, 0, 0);
}

static void gelu_rows(Job *job, long chunk, long next) {
  (void)next;
  gate_rows(job, chunk, 1, 0);
}

static void silu_rows_back(Job *job, long chunk, long next) {
  (void)next;
  gate_rows(job, chunk, 0, 1);
}

static void gelu_rows_back(Job *job, long chunk, long next) {
  (void)next;
  gate_rows(job, chunk, 1, 1);
}

/* Whether an array is [rows, width] float32. */
static int is_matrix(const XLA_FFI_Buffer *x, long rows, long width) {
  if (x->dtype != XLA_FFI_DataType_F32 || x->rank != 2) return 0;
  return x->dims[0] == rows && x->dims[1] == width;
}

static int is_vector(const XLA_FFI_Buffer *x, long width) {
  return x->dtype == XLA_FFI_DataType_F32 && x->rank == 1 && x->dims[0] == width;
}

static long chunks_of(long rows, long rows_a_chunk) {
  return (rows + rows_a_chunk - 1) / rows_a_chunk;
}

static XLA_FFI_Error *run_norm(XLA_FFI_CallFrame *frame, int is_backward) {
  if (tells_version(frame)) return NULL;
  if (frame->args.size != 3 + is_backward || frame->rets.size != 1 + is_backward)
    return fail(frame, "jaxrl_norm: takes or returns another number of arrays");
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  XLA_FFI_Buffer **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *x = args[0], *epsilon = args[2];
  long rows = x->rank == 2 ? x->dims[0] : 0, width = x->rank == 2 ? x->dims[1] : 0;
  long rows_a_chunk = rows_of_sum(width), num_chunks = chunks_of(rows, rows_a_chunk);
  int fits = is_matrix(x, rows, width) && is_vector(args[1], width) &&
             is_matrix(rets[0], rows, width) && epsilon->rank == 0 &&
             epsilon->dtype == XLA_FFI_DataType_F32;
  if (is_backward)
    fits = fits && is_matrix(args[3], rows, width) && is_matrix(rets[1], num_chunks, width);
  if (!fits) return fail(frame, "jaxrl_norm: shapes or types do not fit together");
  Norm *n = calloc(1, sizeof *n);
  if (!n) return fail(frame, "jaxrl_norm: out of memory");
  n->x = x->data, n->scale = args[1]->data, n->epsilon = *(const float *)epsilon->data;
  n->rows = rows, n->width = width, n->rows_a_chunk = rows_a_chunk;
  if (is_backward)
    n->dy = args[3]->data, n->dx = rets[0]->data, n->of_scale = rets[1]->data;
  else
    n->y = rets[0]->data;
  n->job.run = is_backward ? norm_rows_back : norm_rows;
  n->job.num_chunks = num_chunks;
  run_job(frame, &n->job, rows * width * 4 * (1 + is_backward));
  release(&n->job);
  return NULL;
}

static XLA_FFI_Error *
run_gate(XLA_FFI_CallFrame *frame, void (*run)(Job *, long, long), int is_backward) {
  if (tells_version(frame)) return NULL;
  const int is_joined = !is_backward && frame->args.size == 1;
  if (frame->args.size != (is_backward ? 3 : is_joined ? 1 : 2) ||
      frame->rets.size != (is_backward ? 3 : 1))
    return fail(frame, "jaxrl_gate: takes or returns another number of arrays");
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  XLA_FFI_Buffer **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *out = rets[0];
  long rows = out->rank == 2 ? out->dims[0] : 0, width = out->rank == 2 ? out->dims[1] : 0;
  long stride = is_joined ? 2 * width : width;
  int fits = 1;
  for (long i = 0; i < frame->args.size; i++)
    fits = fits && is_matrix(args[i], rows, stride);
  for (long i = 0; i < frame->rets.size; i++)
    fits = fits && is_matrix(rets[i], rows, width);
  if (!fits) return fail(frame, "jaxrl_gate: shapes or types do not fit together");
  Gate *p = calloc(1, sizeof *p);
  if (!p) return fail(frame, "jaxrl_gate: out of memory");
  p->rows = rows, p->width = width, p->stride = stride;
  p->gate = args[0]->data, p->up = is_joined ? p->gate + width : args[1]->data;
  if (is_backward) {
    p->slope = args[2]->data;
    p->of_gate = rets[0]->data, p->of_up = rets[1]->data, p->product = rets[2]->data;
  } else
    p->product = rets[0]->data;
  p->rows_a_chunk = rows_of_sum(width);
  p->job.run = run;
  p->job.num_chunks = chunks_of(rows, p->rows_a_chunk);
  run_job(frame, &p->job, rows * width * 4 * (is_backward ? 3 : 2));
  release(&p->job);
  return NULL;
}

XLA_FFI_Error *jaxrl_norm(XLA_FFI_CallFrame *frame) { return run_norm(frame, 0); }

XLA_FFI_Error *jaxrl_norm_back(XLA_FFI_CallFrame *frame) { return run_norm(frame, 1); }

XLA_FFI_Error *jaxrl_gate_silu(XLA_FFI_CallFrame *frame) {
  return run_gate(frame, silu_rows, 0);
}

XLA_FFI_Error *jaxrl_gate_gelu_tanh(XLA_FFI_CallFrame *frame) {
  return run_gate(frame, gelu_rows, 0);
}

XLA_FFI_Error *jaxrl_gate_silu_back(XLA_FFI_CallFrame *frame) {
  return run_gate(frame, silu_rows_back, 1);
}

XLA_FFI_Error *jaxrl_gate_gelu_tanh_back(XLA_FFI_CallFrame *frame) {
  return run_gate(frame, gelu_rows_back, 1);
}
