/* Max pooling of elements of one type T, and integers INT as wide as it; included once for each type. */

/* Copy or add cells, `to_step` and `from_step` elements apart; small numbers of channels are compile-time constants. */
static inline void NAME(move)(T *restrict to, Py_ssize_t to_step, const T *restrict from, Py_ssize_t from_step,
                              Py_ssize_t cells, Py_ssize_t channels, int add) {
    if (to_step == channels && from_step == channels) {
        channels *= cells;
        cells = 1;
    }
#define EACH(n, assign)                                   \
    for (Py_ssize_t o = 0; o < cells; o++) {            \
        T *a = to + o * to_step;                        \
        const T *b = from + o * from_step;              \
        IVDEP for (Py_ssize_t c = 0; c < (n); c++) a[c] assign b[c]; \
    }
#define BOTH(n)          \
    if (add)             \
        EACH(n, +=)      \
    else                 \
        EACH(n, =)
#define CASE(n) \
    case n:     \
        BOTH(n) \
        break;
    switch (channels) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    default:
        BOTH(channels)
    }
#undef EACH
#undef BOTH
#undef CASE
}

/* Where elements of k cells, `gap` apart, are above the best, or NaN, keep them and their position. */
static inline void NAME(take_max)(T *best, INT *position, const T *x, Py_ssize_t gap, Py_ssize_t n, INT at, INT k) {
    for (; k >= 2; k -= 2, at += 2, x += 2 * gap)
        IVDEP for (Py_ssize_t i = 0; i < n; i++) {
            const T v = x[i], u = x[i + gap], b = best[i];
            const int is_greater = (v > b) | (v != v);
            const T b2 = is_greater ? v : b;
            const INT p = is_greater ? at : position[i], next = at + 1;
            const int is_next_greater = (u > b2) | (u != u);
            best[i] = is_next_greater ? u : b2;
            position[i] = is_next_greater ? next : p;
        }
    if (k)
        IVDEP for (Py_ssize_t i = 0; i < n; i++) {
            const T v = x[i], b = best[i];
            const int is_greater = (v > b) | (v != v);
            best[i] = is_greater ? v : b;
            position[i] = is_greater ? at : position[i];
        }
}

/* The maxima of `cells` adjacent cells of a row of outputs, or of some channels of one cell. */
CLONES static void NAME(maxima)(const Pool *job, const char *x, char *y, unsigned char *positions, Py_ssize_t cells,
                                Py_ssize_t channels) {
    const Py_ssize_t size = sizeof(T), elements = cells * channels,
                     step = job->stride[LAST_AXIS] * job->x_step[LAST_AXIS] / size;
    const int adjacent = cells == 1 || step == channels;
    const Py_ssize_t k = job->kernel[LAST_AXIS], gap = job->x_step[LAST_AXIS] / size;
    _Alignas(64) T best[ROW], part[ROW];
    _Alignas(64) INT position[ROW];
    INT at = 0;
    NAME(move)(best, channels, (const T *)x, step, cells, channels, 0);
    memset(position, 0, elements * sizeof(INT));
    for (Py_ssize_t d = 0; d < job->kernel[1]; d++)
        for (Py_ssize_t h = 0; h < job->kernel[2]; h++, at += (INT)k) {
            const T *row = (const T *)(x + d * job->x_step[1] + h * job->x_step[2]);
            if (!adjacent && channels >= MIN_VECTOR_CHANNELS) {
                for (Py_ssize_t o = 0; o < cells; o++)
                    NAME(take_max)(best + o * channels, position + o * channels, row + o * step, gap, channels, at,
                                   (INT)k);
            } else if (adjacent) {
                NAME(take_max)(best, position, row, gap, elements, at, (INT)k);
            } else {
                for (Py_ssize_t w = 0; w < k; w++) {
                    NAME(move)(part, channels, row + w * gap, step, cells, channels, 0);
                    NAME(take_max)(best, position, part, 0, elements, at + (INT)w, 1);
                }
            }
        }
    NAME(move)((T *)y, job->y_step[LAST_AXIS] / size, best, channels, cells, channels, 0);
    if (job->fused_relu)
        IVDEP for (Py_ssize_t i = 0; i < elements; i++) position[i] = best[i] > 0 ? position[i] : NO_POSITION;
    IVDEP for (Py_ssize_t i = 0; i < elements; i++) positions[i] = (unsigned char)position[i];
}

/* Add gradients of cells, `from_step` elements apart, to k cells of each window, from position `at` on. */
CLONES static void NAME(scatter_gradients)(T *dx, Py_ssize_t to_step, Py_ssize_t gap, const T *dy,
                                           Py_ssize_t from_step, const unsigned char *positions, Py_ssize_t cells,
                                           Py_ssize_t channels, INT at, INT k, int add) {
    const Py_ssize_t elements = cells * channels;
    _Alignas(64) T gradients[ROW], part[ROW];
    _Alignas(64) INT position[ROW];
    IVDEP for (Py_ssize_t i = 0; i < elements; i++) position[i] = positions[i];
    if (cells > 1 && from_step != channels) {
        NAME(move)(gradients, channels, dy, from_step, cells, channels, 0);
        dy = gradients;
    }
    for (; k > 0; k--, at++, dx += gap) {
        if (channels >= MIN_VECTOR_CHANNELS) {
            for (Py_ssize_t o = 0; o < cells; o++) {
                T *to = dx + o * to_step;
                const T *from = dy + o * channels;
                const INT *cell_position = position + o * channels;
                IVDEP for (Py_ssize_t c = 0; c < channels; c++) {
                    const T v = from[c], old = add ? to[c] : 0;
                    to[c] = cell_position[c] == at ? old + v : old;
                }
            }
            continue;
        }
        IVDEP for (Py_ssize_t i = 0; i < elements; i++) {
            const T v = dy[i];
            part[i] = position[i] == at ? v : 0;
        }
        NAME(move)(dx, to_step, part, channels, cells, channels, add);
    }
}

/* Write row (n, d, h) of the gradient of x, as far as the windows of the cells lo to hi of y determine it. */
static void NAME(gradient_row)(const Pool *job, const Py_ssize_t *row, Py_ssize_t lo, Py_ssize_t hi, Py_ssize_t first,
                              Py_ssize_t channels) {
    const Py_ssize_t size = sizeof(T), k = job->kernel[LAST_AXIS], s = job->stride[LAST_AXIS],
                     step = job->x_step[LAST_AXIS] / size;
    Py_ssize_t from[LAST_AXIS], to[LAST_AXIS], has_windows = 1;
    for (int a = 0; a < LAST_AXIS; a++) { /* the windows that contain cells of the row */
        from[a] = row[a] < job->kernel[a] ? 0 : (row[a] - job->kernel[a]) / job->stride[a] + 1;
        to[a] = MIN(job->out[a], row[a] / job->stride[a] + 1);
        has_windows = has_windows && from[a] < to[a];
    }
    T *dx = (T *)(job->x + row[0] * job->x_step[0] + row[1] * job->x_step[1] + row[2] * job->x_step[2]) + first;
    Py_ssize_t clear = has_windows && job->is_disjoint ? hi * s : lo ? (lo - 1) * s + k : 0;
    const Py_ssize_t end = hi < job->out[LAST_AXIS] ? (hi - 1) * s + k : job->extent[LAST_AXIS];
    if (step == channels && clear < end)
        memset(dx + clear * step, 0, (end - clear) * step * size);
    else
        for (; clear < end; clear++)
            memset(dx + clear * step, 0, channels * size);
    for (Py_ssize_t d = from[1]; d < to[1]; d++)
        for (Py_ssize_t h = from[2]; h < to[2]; h++) {
            const Py_ssize_t cell = ((row[0] * job->out[1] + d) * job->out[2] + h) * job->out[LAST_AXIS] + lo;
            const unsigned char *positions = job->positions + cell * job->channels + first;
            const char *dy = job->y + row[0] * job->y_step[0] + d * job->y_step[1] + h * job->y_step[2];
            const Py_ssize_t at = (row[1] - d * job->stride[1]) * job->kernel[2] + row[2] - h * job->stride[2];
            NAME(scatter_gradients)(
                dx + lo * s * step, s * step, step, (const T *)(dy + lo * job->y_step[LAST_AXIS]) + first,
                job->y_step[LAST_AXIS] / size, positions, hi - lo, channels, (INT)(at * k), (INT)k, !job->is_disjoint);
        }
}

/* Process a row of outputs, or the rows of x at which its windows begin, piece by piece. */
static void NAME(pool_row)(const Pool *job, Py_ssize_t *at) {
    const Py_ssize_t out = job->out[LAST_AXIS], size = sizeof(T);
    const Py_ssize_t stop = job->is_backward ? MIN((at[2] + 1) * job->stride[2], job->extent[2]) : 0;
    for (Py_ssize_t first = 0, channels; first < job->channels; first += channels) {
        channels = MIN(ROW, job->channels - first);
        Py_ssize_t lo = 0, hi;
        do {
            hi = MIN(lo + MAX(1, ROW / job->channels), out);
            if (job->is_backward) {
                Py_ssize_t row[LAST_AXIS] = {at[0], at[1], at[2] * job->stride[2]};
                for (; row[2] < stop; row[2]++)
                    NAME(gradient_row)(job, row, lo, hi, first, channels);
            } else {
                char *x = job->x + first * size, *y = job->y + first * size + lo * job->y_step[LAST_AXIS];
                Py_ssize_t cell = 0;
                for (int a = 0; a < LAST_AXIS; a++) {
                    x += at[a] * job->stride[a] * job->x_step[a];
                    y += at[a] * job->y_step[a];
                    cell = (cell + at[a]) * job->out[a + 1];
                }
                NAME(maxima)(job, x + lo * job->stride[LAST_AXIS] * job->x_step[LAST_AXIS], y,
                             job->positions + (cell + lo) * job->channels + first, hi - lo, channels);
            }
            lo = hi;
        } while (lo < out);
    }
}
