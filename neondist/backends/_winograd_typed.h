/* Winograd's convolution for numbers of one type T, vectors of BYTES and blocks of ROWS; included for each of them. */

#define VEC NAME(Vec)
typedef T VEC __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
#define LANES ((Py_ssize_t)(BYTES / sizeof(T)))
#define AT(p) (*(VEC *)(p))
#define SEEN(p) (*(const VEC *)(p))
#define INLINE TARGET static inline __attribute__((always_inline))

/* c (rows, vecs) = or, if `add`, += a (rows, k) b (k, vecs); a's numbers are `across` and `along` apart. */
INLINE void NAME(block)(const int rows, const int vecs, Py_ssize_t k, const T *a, Py_ssize_t across, Py_ssize_t along,
                        const T *b, Py_ssize_t b_row, T *c, Py_ssize_t c_row, const int add) {
    VEC sum[ROWS][2] = {0};
    for (; k > 0; k--, a += along, b += b_row) {
        const VEC b0 = SEEN(b), b1 = vecs > 1 ? SEEN(b + LANES) : b0;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const T factor = a[r * across];
            sum[r][0] += factor * b0;
            if (vecs > 1)
                sum[r][1] += factor * b1;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) {
            T *at = c + r * c_row + v * LANES;
            AT(at) = sum[r][v] + (add ? SEEN(at) : (VEC){0});
        }
}

/* The product of matrices: c (rows, columns) = a b, or, of a turned round, c += a^T b; columns fill vectors. */
INLINE void NAME(product)(const int turned, Py_ssize_t rows, Py_ssize_t k, Py_ssize_t columns, const T *a,
                          Py_ssize_t a_row, const T *b, Py_ssize_t b_row, Py_ssize_t b_panel, T *c, Py_ssize_t c_row) {
    const Py_ssize_t across = turned ? 1 : a_row, along = turned ? a_row : 1;
#define BLOCK_OF(n)                                                                                        \
    for (; rows - r >= (n); r += (n)) {                                                                    \
        if (vecs > 1)                                                                                      \
            NAME(block)(n, 2, k, a + r * across, across, along, b, b_row, c + r * c_row, c_row, turned);   \
        else                                                                                               \
            NAME(block)(n, 1, k, a + r * across, across, along, b, b_row, c + r * c_row, c_row, turned);   \
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

/* V = B^T x B of one tile, whose cells are at `x`. */
INLINE void NAME(transform)(T *const *x, T *to, Py_ssize_t apart, Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        VEC half[4][4];
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) {
            const VEC a = SEEN(x[w] + z), b = SEEN(x[4 + w] + z), c = SEEN(x[8 + w] + z), d = SEEN(x[12 + w] + z);
            half[0][w] = a - c, half[1][w] = b + c, half[2][w] = c - b, half[3][w] = d - b;
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            T *row = to + 4 * h * apart + z;
            const VEC a = half[h][0], b = half[h][1], c = half[h][2], d = half[h][3];
            AT(row) = a - c;
            AT(row + apart) = b + c;
            AT(row + 2 * apart) = c - b;
            AT(row + 3 * apart) = d - b;
        }
    }
}

/* D = A y A^T of one tile: the adjoint of `give`. */
INLINE void NAME(transform_back)(T *const *y, T *to, Py_ssize_t apart, Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        VEC half[4][2];
#pragma GCC unroll 2
        for (int w = 0; w < 2; w++) {
            const VEC a = SEEN(y[w] + z), b = SEEN(y[2 + w] + z);
            half[0][w] = a, half[1][w] = a + b, half[2][w] = a - b, half[3][w] = b;
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            T *row = to + 4 * h * apart + z;
            const VEC a = half[h][0], b = half[h][1];
            AT(row) = a;
            AT(row + apart) = a + b;
            AT(row + 2 * apart) = a - b;
            AT(row + 3 * apart) = b;
        }
    }
}

/* y = A^T M A of one tile plus bias. */
INLINE void NAME(give)(const T *from, Py_ssize_t apart, T *const *y, const T *bias, Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        VEC half[2][4];
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) {
            const T *m = from + w * apart + z;
            const VEC a = SEEN(m), b = SEEN(m + 4 * apart), c = SEEN(m + 8 * apart), d = SEEN(m + 12 * apart);
            half[0][w] = a + b + c, half[1][w] = b - c + d;
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const VEC more = SEEN(bias + z), *m = half[h];
            AT(y[2 * h] + z) = m[0] + m[1] + m[2] + more;
            AT(y[2 * h + 1] + z) = m[1] - m[2] + m[3] + more;
        }
    }
}

/* U = G w G^T of rows lo to hi of the weights' matrix (k, outer), in panels of two vectors. */
TARGET static void NAME(weights)(const Winograd *job, void *to, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t wide = 2 * LANES, apart = job->u_apart, step = job->w_step[4] / (Py_ssize_t)sizeof(T);
    for (Py_ssize_t row = lo; row < hi; row++)
        for (Py_ssize_t first = 0; first < job->outer; first += wide) {
            const char *w = job->w + row / job->inner * job->w_step[0] + row % job->inner * job->w_step[3];
            const Py_ssize_t n = MIN(wide, job->outer - first);
            T half[4][3][2 * BYTES / sizeof(T)], *u = (T *)to + first * job->k + row * wide;
            for (int x = 0; x < 3; x++, w += job->w_step[2]) {
                const T *a = (const T *)w + first * step, *b = (const T *)(w + job->w_step[1]) + first * step,
                        *c = (const T *)(w + 2 * job->w_step[1]) + first * step;
#define COLUMN(s)                                                          \
    for (Py_ssize_t i = 0; i < n; i++) {                                   \
        const T p = a[i * (s)], q = b[i * (s)], r = c[i * (s)], e = p + r; \
        half[0][x][i] = p;                                                 \
        half[1][x][i] = (e + q) / 2;                                       \
        half[2][x][i] = (e - q) / 2;                                       \
        half[3][x][i] = r;                                                 \
    }
                if (step == 1) {
                    COLUMN(1)
                } else {
                    COLUMN(step)
                }
#undef COLUMN
            }
            for (int h = 0; h < 4; h++, u += 4 * apart)
                for (Py_ssize_t i = 0; i < n; i++) {
                    const T p = half[h][0][i], q = half[h][1][i], r = half[h][2][i], e = p + r;
                    u[i] = p;
                    u[i + apart] = (e + q) / 2;
                    u[i + 2 * apart] = (e - q) / 2;
                    u[i + 3 * apart] = r;
                }
        }
}

/* dw = G^T dU G of rows lo to hi of the weights' matrix; dU is the sum over all shares, in their order. */
TARGET static void NAME(weights_back)(const Winograd *job, void *u, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t apart = job->u_apart, n = job->outer;
    for (Py_ssize_t row = lo; row < hi; row++) {
        T *sum = (T *)u + row * job->u_row;
        for (Py_ssize_t share = 1; share < job->shares; share++)
            for (int part = 0; part < 16; part++)
                IVDEP for (Py_ssize_t i = 0; i < n; i++) sum[part * apart + i] += sum[(share * 16 + part) * apart + i];
        for (Py_ssize_t i = 0; i < n; i++, sum++) {
            char *w = job->w + row / job->inner * job->w_step[0] + row % job->inner * job->w_step[3];
            T half[3][4];
            for (int x = 0; x < 4; x++) {
                const T *m = sum + x * apart, even = (m[4 * apart] + m[8 * apart]) / 2;
                half[0][x] = m[0] + even;
                half[1][x] = (m[4 * apart] - m[8 * apart]) / 2;
                half[2][x] = even + m[12 * apart];
            }
            for (int h = 0; h < 3; h++) {
                const T *m = half[h], even = (m[1] + m[2]) / 2;
                const T found[3] = {m[0] + even, (m[1] - m[2]) / 2, even + m[3]};
                for (int x = 0; x < 3; x++)
                    *(T *)(w + h * job->w_step[1] + x * job->w_step[2] + i * job->w_step[4]) = found[x];
            }
        }
    }
}

/* Tiles lo to hi: their transforms and products; then outputs, or what they add to dU. */
TARGET static void NAME(tiles)(const Winograd *job, void *scratch, void *u, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t v_apart = job->v_apart, m_apart = job->m_apart;
    T *v = scratch, *m = v + 16 * v_apart, *none = m + 16 * m_apart, *lost = none + job->longest;
    Place at;
    for (Py_ssize_t t = 0; t < hi - lo; t++) {
        place(job, &at, lo + t, t == 0);
        for (Py_ssize_t d = 0; d < job->depth; d++) {
            T *x[16];
            cells(&job->x, &at, d - job->before[0], -job->before[1], -job->before[2], 4, (char *)none, (char **)x);
            NAME(transform)(x, v + t * job->v_row + d * job->inner, v_apart, job->inner);
        }
        if (job->back) {
            T *y[4];
            cells(&job->y, &at, 0, 0, 0, 2, (char *)none, (char **)y);
            NAME(transform_back)(y, m + t * job->m_row, m_apart, job->outer);
        }
    }
    for (int part = 0; part < 16; part++) {
        const T *a = v + part * v_apart;
        T *b = (T *)u + part * job->u_apart, *c = m + part * m_apart;
        const Py_ssize_t wide = 2 * LANES, k = job->k, n = job->outer;
        if (job->back)
            NAME(product)(1, k, hi - lo, n, a, job->v_row, c, job->m_row, wide, b, job->u_row);
        else
            NAME(product)(0, hi - lo, k, n, a, job->v_row, b, wide, wide * k, c, job->m_row);
    }
    for (Py_ssize_t t = 0; t < hi - lo && !job->back; t++) {
        const T *from = m + t * job->m_row, *bias = job->bias == NULL ? none : (const T *)job->bias;
        T *y[4];
        place(job, &at, lo + t, t == 0);
        cells(&job->y, &at, 0, 0, 0, 2, (char *)lost, (char **)y);
        NAME(give)(from, m_apart, y, bias, job->outer);
    }
}

#undef VEC
#undef LANES
#undef AT
#undef SEEN
#undef INLINE
#undef EACH_VECTOR
