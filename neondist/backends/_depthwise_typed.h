/* Depthwise convolutions, for elements of one type T and vectors of BYTES; included for each. */

#define VEC NAME(Vec)
#define LANES ((Py_ssize_t)(BYTES / sizeof(T)))
#define AT(p) (*(VEC *)(p))
#define LOAD(p) (*(const VEC *)(p))
#define INLINE TARGET static inline __attribute__((always_inline))
#define EACH_VECTOR(channels) \
    for (Py_ssize_t i = 0, z = 0; i < (channels); i += LANES, z = i + LANES > (channels) ? (channels) - LANES : i)

/* n cells of a row: y = bias + the sum over taps of w x; `x_step` and `y_step` elements apart. */
INLINE void NAME(taps)(const int cells, const int count, const T *const *x, const T *const *w, const T *bias, T *y,
                       Py_ssize_t offset, Py_ssize_t x_step, Py_ssize_t y_step, Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        const VEC first = bias == NULL ? (VEC){0} : LOAD(bias + z);
        VEC sum[4] = {first, first, first, first};
        for (int t = 0; t < count; t++) {
            const VEC factor = LOAD(w[t] + z);
            const T *at = x[t] + offset + z;
            if (t >= count - 3) { /* only a window's last row: earlier windows have fetched the other rows */
#pragma GCC unroll 4
                for (int r = 0; r < cells; r++)
                    __builtin_prefetch(at + (r + 8) * x_step);
            }
#pragma GCC unroll 4
            for (int r = 0; r < cells; r++)
                sum[r] += factor * LOAD(at + r * x_step);
        }
#pragma GCC unroll 4
        for (int r = 0; r < cells; r++)
            AT(y + r * y_step + z) = sum[r];
    }
}

INLINE void NAME(run)(const int count, const T *const *x, const T *const *w, const T *bias, T *y, Py_ssize_t n,
                      Py_ssize_t x_step, Py_ssize_t y_step, Py_ssize_t channels) {
    Py_ssize_t q = 0;
    for (; q + 4 <= n; q += 4)
        NAME(taps)(4, count, x, w, bias, y + q * y_step, q * x_step, x_step, y_step, channels);
    for (; q < n; q++)
        NAME(taps)(1, count, x, w, bias, y + q * y_step, q * x_step, x_step, y_step, channels);
}

/* The same if only the channels of several cells fill a vector: w and bias repeat. */
INLINE void NAME(run_few)(const int count, const T **x, const T *const *w, const T *bias, T *y, Py_ssize_t n,
                          Py_ssize_t channels) {
    const Py_ssize_t period = channels * LANES, num_vectors = n / LANES;
    NAME(run)(count, x, w, bias, y, num_vectors, period, period, period);
    if (num_vectors && n % LANES) /* the last vector overlaps the previous one */
        NAME(taps)(1, count, x, w, bias, y + (n - LANES) * channels, (n - LANES) * channels, period, period, period);
    for (Py_ssize_t i = 0; i < n * channels && !num_vectors; i++) {
        T sum = bias == NULL ? 0 : bias[i % channels];
        for (int t = 0; t < count; t++)
            sum += w[t][i % channels] * x[t][i];
        y[i] = sum;
    }
}

/* Rows lo to hi of y. */
TARGET static void NAME(depthwise_rows)(const Depthwise *job, void *sums, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t size = sizeof(T), channels = job->channels, phases = job->is_backward ? job->stride[2] : 1;
    const Py_ssize_t x_step = (job->is_backward ? 1 : job->stride[2]) * job->x.step[3] / size;
    const Py_ssize_t y_step = phases * job->y.step[3] / size;
    const T *x[TAPS], *w[TAPS], *used_x[TAPS], *used_w[TAPS];
    Py_ssize_t column[TAPS];
    for (Py_ssize_t row = lo; row < hi; row++) {
        const Position at = row_at(&job->y, row);
        T *y = (T *)line_at(&job->y, at.n, at.d, at.h);
        for (Py_ssize_t phase = 0; phase < phases; phase++) {
            const Py_ssize_t num_outputs = (job->y.extent[3] - phase + phases - 1) / phases;
            Py_ssize_t begin = 0, end = num_outputs;
            int count = 0;
            for (Py_ssize_t tap = 0; tap < job->taps; tap++) {
                const Py_ssize_t k[3] = {tap / job->kernel[2] / job->kernel[1], tap / job->kernel[2] % job->kernel[1],
                                         tap % job->kernel[2]};
                Py_ssize_t from[3];
                if (!find_input(job, 0, at.d, k[0], from) || !find_input(job, 1, at.h, k[1], from + 1) ||
                    from[0] < 0 || from[0] >= job->x.extent[1] || from[1] < 0 || from[1] >= job->x.extent[2] ||
                    !find_input(job, 2, phase, k[2], from + 2))
                    continue;
                x[count] = (const T *)(line_at(&job->x, at.n, from[0], from[1]) + from[2] * job->x.step[3]);
                w[count] = (const T *)job->w + tap * job->tap_width;
                column[count++] = from[2];
                const Py_ssize_t step = job->is_backward ? 1 : job->stride[2], left = job->x.extent[3] - from[2];
                begin = MAX(begin, from[2] < 0 ? (-from[2] + step - 1) / step : 0);
                end = MIN(end, left > 0 ? (left + step - 1) / step : 0);
            }
            const T *bias = (const T *)job->bias;
            T *target = y + phase * job->y.step[3] / size;
            begin = MIN(begin, num_outputs);
            end = MAX(end, begin);
            for (Py_ssize_t q = 0; q < num_outputs; q++) { /* windows at the ends have fewer cells inside */
                if (q == begin && begin < end) {
                    for (int t = 0; t < count; t++)
                        used_x[t] = x[t] + begin * x_step;
                    if (job->tap_width == channels)
                        NAME(run)(count, used_x, w, bias, target + q * y_step, end - begin, x_step, y_step, channels);
                    else
                        NAME(run_few)(count, used_x, w, bias, target + q * y_step, end - begin, channels);
                    q = end - 1;
                    continue;
                }
                int num_used = 0;
                for (int t = 0; t < count; t++) {
                    const Py_ssize_t from = column[t] + q * (job->is_backward ? 1 : job->stride[2]);
                    if (from >= 0 && from < job->x.extent[3]) {
                        used_x[num_used] = x[t] + q * x_step;
                        used_w[num_used++] = w[t];
                    }
                }
                if (job->tap_width == channels)
                    NAME(run)(num_used, used_x, used_w, bias, target + q * y_step, 1, x_step, y_step, channels);
                else
                    NAME(run_few)(num_used, used_x, used_w, bias, target + q * y_step, 1, channels);
            }
        }
    }
}

/* Contributions of n cells to the gradients of some taps, each of `channels` elements. */
INLINE void NAME(tap_gradients)(const int count, const T *const *x, const T *dy, T *sums, Py_ssize_t n,
                                Py_ssize_t x_step, Py_ssize_t dy_step, Py_ssize_t channels) {
    EACH_VECTOR(channels) {
        VEC sum[9] = {0};
        for (Py_ssize_t q = 0; q < n; q++) {
            const VEC gradient = LOAD(dy + q * dy_step + z);
#pragma GCC unroll 9
            for (int t = 0; t < count; t++)
                sum[t] += gradient * LOAD(x[t] + q * x_step + z);
        }
#pragma GCC unroll 9
        for (int t = 0; t < count; t++)
            for (Py_ssize_t lane = i - z; lane < LANES; lane++) /* the last vector overlaps the previous one */
                sums[t * channels + z + lane] += sum[t][lane];
    }
}

/* Contributions to dw of rows lo to hi of dy and of the cells in their windows. */
TARGET static void NAME(depthwise_weights)(const Depthwise *job, void *argument, Py_ssize_t lo, Py_ssize_t hi) {
    const Py_ssize_t size = sizeof(T), channels = job->channels, n = job->y.extent[3], dy_step = job->y.step[3] / size;
    const Py_ssize_t x_step = job->stride[2] * job->x.step[3] / size, max_cells = MAX(16, 2048 / channels);
    const T *x[TAPS];
    for (Py_ssize_t row = lo; row < hi; row++) {
        const Position at = row_at(&job->y, row);
        const T *dy = (const T *)line_at(&job->y, at.n, at.d, at.h);
        for (Py_ssize_t tap = 0; tap < job->taps; tap++) {
            Py_ssize_t plane, line, column;
            find_input(job, 0, at.d, tap / job->kernel[2] / job->kernel[1], &plane);
            find_input(job, 1, at.h, tap / job->kernel[2] % job->kernel[1], &line);
            find_input(job, 2, 0, tap % job->kernel[2], &column);
            x[tap] = (const T *)(line_at(&job->x, at.n, plane, line) + column * job->x.step[3]);
        }
        for (Py_ssize_t first = 0; first < n; first += max_cells) {
            const Py_ssize_t cells = MIN(max_cells, n - first);
            const T *gradients = dy + first * dy_step;
            T *sums = argument;
            int t = 0;
#define SOME_OF(count)                                                                                                 \
    for (; job->taps - t >= (count); t += (count), sums += (count) * channels)                                         \
        NAME(tap_gradients)((count), x + t, gradients, sums, cells, x_step, dy_step, channels);
            SOME_OF(9) SOME_OF(5) SOME_OF(3) SOME_OF(1)
#undef SOME_OF
            for (int tap = 0; tap < job->taps; tap++)
                x[tap] += cells * x_step;
        }
    }
}

#undef VEC
#undef LANES
#undef AT
#undef LOAD
#undef INLINE
#undef EACH_VECTOR
