/* Winograd's convolution for a kernel of KERNEL x KERNEL, elements of one type T, vectors of BYTES and blocks of ROWS;
   included for each of them. */

#define VEC NAME(Vec)
typedef T VEC __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
#define LANES ((Py_ssize_t)(BYTES / sizeof(T)))
#define AT(p) (*(VEC *)(p))
#define LOAD(p) (*(const VEC *)(p))
#define SIDE (KERNEL + 1)
#define PARTS (SIDE * SIDE)
#define INLINE TARGET static inline __attribute__((always_inline))

/* sum (rows, vecs) += a (rows, k) b (k, vecs); a's elements are `row_stride` and `column_stride` apart. */
INLINE void NAME(add_products)(VEC (*sum)[2], const int rows, const int vecs, Py_ssize_t k, const T *a,
                               Py_ssize_t row_stride, Py_ssize_t column_stride, const T *b, Py_ssize_t b_row) {
    for (; k > 0; k--, a += column_stride, b += b_row) {
        const VEC b0 = LOAD(b), b1 = vecs > 1 ? LOAD(b + LANES) : b0;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const T factor = a[r * row_stride];
            sum[r][0] += factor * b0;
            if (vecs > 1)
                sum[r][1] += factor * b1;
        }
    }
}

/* c (rows, vecs) = or, if `add`, += a b, as above. */
INLINE void NAME(block)(const int rows, const int vecs, Py_ssize_t k, const T *a, Py_ssize_t row_stride,
                        Py_ssize_t column_stride, const T *b, Py_ssize_t b_row, T *c, Py_ssize_t c_row, const int add) {
    VEC sum[ROWS][2] = {0};
    NAME(add_products)(sum, rows, vecs, k, a, row_stride, column_stride, b, b_row);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) {
            T *at = c + r * c_row + v * LANES;
            AT(at) = sum[r][v] + (add ? LOAD(at) : (VEC){0});
        }
}

/* The product of matrices: c (rows, columns) = a b, or c += a^T b for a transposed a; columns fill vectors. */
INLINE void NAME(product)(const int transposed, Py_ssize_t rows, Py_ssize_t k, Py_ssize_t columns, const T *a,
                          Py_ssize_t a_row, const T *b, Py_ssize_t b_row, Py_ssize_t b_panel, T *c, Py_ssize_t c_row) {
    const Py_ssize_t row_stride = transposed ? 1 : a_row, column_stride = transposed ? a_row : 1;
#define BLOCK_OF(n)                                                                                                    \
    for (; rows - r >= (n); r += (n)) {                                                                                \
        if (vecs > 1)                                                                                                  \
            NAME(block)(n, 2, k, a + r * row_stride, row_stride, column_stride, b, b_row, c + r * c_row, c_row,        \
                        transposed);                                                                                   \
        else                                                                                                           \
            NAME(block)(n, 1, k, a + r * row_stride, row_stride, column_stride, b, b_row, c + r * c_row, c_row,        \
                        transposed);                                                                                   \
    }
    for (; columns > 0; columns -= 2 * LANES, b += b_panel, c += 2 * LANES) {
        const int vecs = columns > LANES ? 2 : 1;
        Py_ssize_t r = 0;
        BLOCK_OF(ROWS) BLOCK_OF(4) BLOCK_OF(2) BLOCK_OF(1)
    }
#undef BLOCK_OF
}

#define EACH_VECTOR(channels) \
    for (Py_ssize_t i = 0, z = 0; i < (channels); i += LANES, z = i + LANES > (channels) ? (channels) - LANES : i)

/* Along one axis: `transform_cells_1d` is B^T, `transform_outputs_1d` A^T and `transform_weights_1d` G. */
#if KERNEL == 3 /* the points 0, 1, -1 */
INLINE void NAME(transform_cells_1d)(VEC *to, const VEC *x) {
    to[0] = x[0] - x[2], to[1] = x[1] + x[2], to[2] = x[2] - x[1], to[3] = x[3] - x[1];
}

INLINE void NAME(transform_outputs_1d)(VEC *to, const VEC *m) {
    to[0] = m[0] + m[1] + m[2], to[1] = m[1] - m[2] + m[3];
}

INLINE void NAME(transform_outputs_1d_adjoint)(VEC *to, const VEC *y) {
    to[0] = y[0], to[1] = y[0] + y[1], to[2] = y[0] - y[1], to[3] = y[1];
}

INLINE void NAME(transform_weights_1d)(T *to, const T *w) {
    const T even = w[0] + w[2];
    to[0] = w[0], to[1] = (even + w[1]) / 2, to[2] = (even - w[1]) / 2, to[3] = w[2];
}

INLINE void NAME(transform_weights_1d_adjoint)(T *to, const T *u) {
    const T even = (u[1] + u[2]) / 2;
    to[0] = u[0] + even, to[1] = (u[1] - u[2]) / 2, to[2] = even + u[3];
}
#else /* the points 0, 1, -1, 1/2, -2: with other points, rounding errors are at least 1.5 times as large */
INLINE void NAME(transform_cells_1d)(VEC *to, const VEC *x) {
    const VEC a = x[4] - x[2], b = x[3] - x[1], sum = x[4] + (T)1.5 * x[3] - x[2], rest = x[3] + (T)1.5 * x[2] - x[1];
    to[0] = a + x[0] - x[2] + (T)1.5 * b, to[1] = sum + rest, to[2] = sum - rest;
    to[3] = a + 2 * b, to[4] = a - (T)0.5 * b, to[5] = x[5] - x[3] - b + (T)1.5 * a;
}

INLINE void NAME(transform_outputs_1d)(VEC *to, const VEC *m) {
    to[0] = m[0] + m[1] + m[2] + m[3] + m[4], to[1] = m[1] - m[2] + (T)0.5 * m[3] - 2 * m[4] + m[5];
}

INLINE void NAME(transform_outputs_1d_adjoint)(VEC *to, const VEC *y) {
    to[0] = y[0], to[1] = y[0] + y[1], to[2] = y[0] - y[1];
    to[3] = y[0] + (T)0.5 * y[1], to[4] = y[0] - 2 * y[1], to[5] = y[1];
}

INLINE void NAME(transform_weights_1d)(T *to, const T *w) {
    const T even = w[0] + w[2] + w[4], odd = w[1] + w[3];
    to[0] = w[0], to[1] = (even + odd) / 3, to[2] = (odd - even) / 3, to[5] = w[4];
    to[3] = (16 * w[0] + 8 * w[1] + 4 * w[2] + 2 * w[3] + w[4]) / -15;
    to[4] = (w[0] - 2 * w[1] + 4 * w[2] - 8 * w[3] + 16 * w[4]) / 15;
}

INLINE void NAME(transform_weights_1d_adjoint)(T *to, const T *u) {
    const T even = (u[1] - u[2]) / 3, odd = (u[1] + u[2]) / 3, c = u[3] / 15, d = u[4] / 15;
    to[0] = u[0] + even - 16 * c + d, to[1] = odd - 8 * c - 2 * d, to[2] = even - 4 * c + 4 * d;
    to[3] = odd - 2 * c - 8 * d, to[4] = even - c + 16 * d + u[5];
}
#endif

#define EACH(i, n) _Pragma("GCC unroll 6") for (int i = 0; i < (n); i++)

/* V = B^T x B of one tile, whose cells are at `x`. */
INLINE void NAME(transform_cells)(char *const *x, T *to, Py_ssize_t part_stride, Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        VEC partial[SIDE][SIDE], in[SIDE], out[SIDE];
        EACH(w, SIDE) {
            EACH(h, SIDE) in[h] = LOAD((const T *)x[SIDE * h + w] + z);
            NAME(transform_cells_1d)(out, in);
            EACH(h, SIDE) partial[h][w] = out[h];
        }
        EACH(h, SIDE) {
            NAME(transform_cells_1d)(out, partial[h]);
            EACH(w, SIDE) AT(to + (SIDE * h + w) * part_stride + z) = out[w];
        }
    }
}

/* D = A y A^T of one tile: the adjoint of `transform_outputs`. */
INLINE void NAME(transform_outputs_adjoint)(char *const *y, T *to, Py_ssize_t part_stride, Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        VEC partial[SIDE][2], out[SIDE];
        EACH(w, 2) {
            const VEC in[2] = {LOAD((const T *)y[w] + z), LOAD((const T *)y[2 + w] + z)};
            NAME(transform_outputs_1d_adjoint)(out, in);
            EACH(h, SIDE) partial[h][w] = out[h];
        }
        EACH(h, SIDE) {
            NAME(transform_outputs_1d_adjoint)(out, partial[h]);
            EACH(w, SIDE) AT(to + (SIDE * h + w) * part_stride + z) = out[w];
        }
    }
}

/* y = A^T M A of one tile plus bias. */
INLINE void NAME(transform_outputs)(const T *from, Py_ssize_t part_stride, char *const *y, const T *bias,
                                    Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        VEC partial[2][SIDE], in[SIDE], out[2];
        EACH(w, SIDE) {
            EACH(h, SIDE) in[h] = LOAD(from + (SIDE * h + w) * part_stride + z);
            NAME(transform_outputs_1d)(out, in);
            partial[0][w] = out[0], partial[1][w] = out[1];
        }
        EACH(h, 2) {
            NAME(transform_outputs_1d)(out, partial[h]);
            EACH(w, 2) AT((T *)y[2 * h + w] + z) = out[w] + LOAD(bias + z);
        }
    }
}

/* U = G w G^T of rows lo to hi of the weights' matrix (k, outer), in panels of two vectors. */
TARGET static void NAME(weights)(const Winograd *job, void *to, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t panel_width = 2 * LANES, step = job->w_step[4];
    for (Py_ssize_t row = lo; row < hi; row++)
        for (Py_ssize_t first = 0; first < job->outer; first += panel_width) {
            const char *w = job->w + row / job->inner * job->w_step[0] + row % job->inner * job->w_step[3] + first * step;
            const Py_ssize_t n = MIN(panel_width, job->outer - first);
            T partial[SIDE][KERNEL][2 * BYTES / sizeof(T)], *u = (T *)to + first * job->k + row * panel_width;
            for (int x = 0; x < KERNEL; x++, w += job->w_step[2])
                for (Py_ssize_t i = 0; i < n; i++) {
                    T in[KERNEL], out[SIDE];
                    EACH(h, KERNEL) in[h] = *(const T *)(w + h * job->w_step[1] + i * step);
                    NAME(transform_weights_1d)(out, in);
                    EACH(h, SIDE) partial[h][x][i] = out[h];
                }
            for (int h = 0; h < SIDE; h++, u += SIDE * job->u_part_stride)
                for (Py_ssize_t i = 0; i < n; i++) {
                    T in[KERNEL], out[SIDE];
                    EACH(x, KERNEL) in[x] = partial[h][x][i];
                    NAME(transform_weights_1d)(out, in);
                    EACH(x, SIDE) u[i + x * job->u_part_stride] = out[x];
                }
        }
}

/* dw = G^T dU G of rows lo to hi of the weights' matrix; dU is the sum over all shares, in their order. */
TARGET static void NAME(weights_back)(const Winograd *job, void *u, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t part_stride = job->u_part_stride, n = job->outer;
    for (Py_ssize_t row = lo; row < hi; row++) {
        T *sum = (T *)u + row * job->u_row;
        for (Py_ssize_t share = 1; share < job->shares; share++)
            for (int part = 0; part < PARTS; part++)
                IVDEP for (Py_ssize_t i = 0; i < n; i++) sum[part * part_stride + i] +=
                    sum[(share * PARTS + part) * part_stride + i];
        for (Py_ssize_t i = 0; i < n; i++, sum++) {
            char *w = job->w + row / job->inner * job->w_step[0] + row % job->inner * job->w_step[3];
            T partial[KERNEL][SIDE], in[SIDE], out[KERNEL];
            EACH(x, SIDE) {
                EACH(h, SIDE) in[h] = sum[(SIDE * h + x) * part_stride];
                NAME(transform_weights_1d_adjoint)(out, in);
                EACH(h, KERNEL) partial[h][x] = out[h];
            }
            EACH(h, KERNEL) {
                NAME(transform_weights_1d_adjoint)(out, partial[h]);
                EACH(x, KERNEL) *(T *)(w + h * job->w_step[1] + x * job->w_step[2] + i * job->w_step[4]) = out[x];
            }
        }
    }
}

/* Tiles lo to hi: transforms and products, then outputs, or contributions to dU. */
TARGET static void NAME(tiles)(const Winograd *job, void *scratch, void *u, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t v_part_stride = job->v_part_stride, m_part_stride = job->m_part_stride;
    T *v = scratch, *m = v + PARTS * v_part_stride, *zeros = m + PARTS * m_part_stride,
      *unused_outputs = zeros + job->longest;
    Position at;
    for (Py_ssize_t t = 0; t < hi - lo; t++) {
        set_tile_position(job, &at, lo + t, t == 0);
        for (Py_ssize_t d = 0; d < job->depth; d++) {
            char *x[PARTS];
            cell_addresses(&job->x, &at, d - job->before[0], -job->before[1], -job->before[2], SIDE, (char *)zeros, x);
            NAME(transform_cells)(x, v + t * job->v_row + d * job->inner, v_part_stride, job->inner);
        }
        if (job->is_backward) {
            char *y[4];
            cell_addresses(&job->y, &at, 0, 0, 0, 2, (char *)zeros, y);
            NAME(transform_outputs_adjoint)(y, m + t * job->m_row, m_part_stride, job->outer);
        }
    }
    for (int part = 0; part < PARTS; part++) {
        const T *a = v + part * v_part_stride;
        T *b = (T *)u + part * job->u_part_stride, *c = m + part * m_part_stride;
        const Py_ssize_t panel_width = 2 * LANES, k = job->k, n = job->outer;
        if (job->is_backward)
            NAME(product)(1, k, hi - lo, n, a, job->v_row, c, job->m_row, panel_width, b, job->u_row);
        else
            NAME(product)(0, hi - lo, k, n, a, job->v_row, b, panel_width, panel_width * k, c, job->m_row);
    }
    for (Py_ssize_t t = 0; t < hi - lo && !job->is_backward; t++) {
        const T *from = m + t * job->m_row, *bias = job->bias == NULL ? zeros : (const T *)job->bias;
        char *y[4];
        set_tile_position(job, &at, lo + t, t == 0);
        cell_addresses(&job->y, &at, 0, 0, 0, 2, (char *)unused_outputs, y);
        NAME(transform_outputs)(from, m_part_stride, y, bias, job->outer);
    }
}

#if KERNEL == 3
#include "_rows_typed.h"
#endif

#undef VEC
#undef LANES
#undef AT
#undef LOAD
#undef SIDE
#undef PARTS
#undef INLINE
#undef EACH_VECTOR
#undef EACH
