/* Convolutions by rows, for elements of one type T, vectors of BYTES and blocks of ROWS; part of _winograd_typed.h. */

/* Contributions to dw of rows lo to hi of dy and of the cells in their windows, whose rows are contiguous. */
TARGET static void NAME(rows_back)(const void *argument, void *to, Py_ssize_t lo, Py_ssize_t hi) {
    const Rows *job = argument;
    const Cells *x = &job->x, *dy = &job->y;
    const Py_ssize_t size = sizeof(T), n = job->outer, b_row = dy->step[3] / size;
    const Py_ssize_t a_row = job->stride[2] * x->step[3] / size;
    for (Py_ssize_t row = lo; row < hi; row++) {
        const Position at = row_at(dy, row);
        const char *b = line_at(dy, at.n, at.d, at.h);
        T *c = to;
        for (Py_ssize_t i = 0; i < job->kernel[0]; i++)
            for (Py_ssize_t j = 0; j < job->kernel[1]; j++, c += job->length * n) {
                const char *a = line_at(x, at.n, at.d * job->stride[0] + i * job->dilation[0],
                                        at.h * job->stride[1] + j * job->dilation[1]);
                for (Py_ssize_t w = 0; w < dy->extent[3]; w += CELLS_PER_PRODUCT)
                    NAME(product)(1, job->length, MIN(CELLS_PER_PRODUCT, dy->extent[3] - w), n,
                                  (const T *)a + w * a_row, a_row, (const T *)b + w * b_row, b_row, 2 * LANES, c, n);
            }
    }
}

/* Outputs w to w + rows, of channels that fill `vecs` vectors or fewer, of a row whose windows see these pieces. */
INLINE void NAME(outputs)(const int rows, const int vecs, const Rows *job, const Piece *pieces, Py_ssize_t count,
                       Py_ssize_t w, const T *b, const T *bias, Py_ssize_t channels, char *y) {
    const Py_ssize_t panel_width = 2 * LANES, step = job->x.step[3] / sizeof(T), row_stride = job->stride[2] * step;
    VEC sum[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        sum[r][0] = LOAD(bias), sum[r][1] = LOAD(bias + LANES);
    for (const Piece *piece = pieces; piece < pieces + count; piece++) {
        const Py_ssize_t cell = w * job->stride[2] + piece->column;
        Py_ssize_t lo = 0, hi = job->length;
        if (rows == 1) { /* windows at one end of the row */
            lo = MIN(MAX(-cell, 0) * job->inner, hi);
            hi = MAX(MIN((job->x.extent[3] - cell) * job->inner, hi), lo);
        }
        NAME(add_products)(sum, rows, vecs, hi - lo, (const T *)piece->at + cell * step + lo, row_stride, 1,
                           b + (piece->first + lo) * panel_width, panel_width);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, y += job->y.step[3]) {
        if (channels == vecs * LANES) {
            AT((T *)y) = sum[r][0];
            if (vecs > 1)
                AT((T *)y + LANES) = sum[r][1];
        } else
            memcpy(y, sum[r], channels * sizeof(T));
    }
}

/* Rows lo to hi of y: outputs of windows whose cells outside x are zero. */
TARGET static void NAME(rows)(const void *argument, void *weights, Py_ssize_t lo, Py_ssize_t hi) {
    const Rows *job = argument;
    const Cells *x = &job->x, *y = &job->y;
    const Py_ssize_t panel_width = 2 * LANES, out = y->extent[3], step = job->stride[2], before = job->before[2];
    const Py_ssize_t pieces_per_row = job->pieces / (job->kernel[0] * job->kernel[1]), k = job->pieces * job->length;
    /* windows of these outputs lie inside */
    const Py_ssize_t last_offset = x->extent[3] - 1 - (job->kernel[2] - 1) * job->dilation[2] + before;
    const Py_ssize_t end = last_offset < 0 ? 0 : MIN(last_offset / step + 1, out);
    const Py_ssize_t first = MIN((MAX(before, 0) + step - 1) / step, end);
    Piece pieces[PIECES];
    for (Py_ssize_t row = lo; row < hi; row++) {
        const Position at = row_at(y, row);
        char *to = line_at(y, at.n, at.d, at.h);
        Py_ssize_t count = 0, number = 0;
        for (Py_ssize_t i = 0; i < job->kernel[0]; i++)
            for (Py_ssize_t j = 0; j < job->kernel[1]; j++) {
                const Py_ssize_t plane = at.d * job->stride[0] + i * job->dilation[0] - job->before[0];
                const Py_ssize_t line = at.h * job->stride[1] + j * job->dilation[1] - job->before[1];
                const int is_inside = plane >= 0 && plane < x->extent[1] && line >= 0 && line < x->extent[2];
                for (Py_ssize_t p = 0; p < pieces_per_row; p++, number++)
                    if (is_inside)
                        pieces[count++] = (Piece){line_at(x, at.n, plane, line), p * job->dilation[2] - before,
                                                  number * job->length};
            }
        const T *b = weights, *bias = b + (job->outer + panel_width - 1) / panel_width * panel_width * k;
        for (Py_ssize_t first_channel = 0; first_channel < job->outer;
             first_channel += panel_width, b += panel_width * k, bias += panel_width, to += panel_width * sizeof(T)) {
            const Py_ssize_t channels = MIN(job->outer - first_channel, panel_width);
            Py_ssize_t w = 0;
#define COMPUTE(n)                                                                                                     \
    {                                                                                                                  \
        if (channels > LANES)                                                                                          \
            NAME(outputs)(n, 2, job, pieces, count, w, b, bias, channels, to + w * y->step[3]);                        \
        else                                                                                                           \
            NAME(outputs)(n, 1, job, pieces, count, w, b, bias, channels, to + w * y->step[3]);                        \
        w += n;                                                                                                        \
    }
            while (w < first)
                COMPUTE(1)
            while (w + ROWS <= end)
                COMPUTE(ROWS)
            while (w + 4 <= end)
                COMPUTE(4)
            while (w + 2 <= end)
                COMPUTE(2)
            while (w < out)
                COMPUTE(1)
#undef COMPUTE
        }
    }
}

/* The weights (k, outer), and the bias behind them, in panels of two vectors. */
static void NAME(panels)(const Rows *job, const Py_buffer *w, const Py_buffer *bias, void *to) {
    const Py_ssize_t panel_width = 2 * LANES, inner = job->inner, first = w->ndim - 5, k = job->pieces * job->length;
    T *b = to;
    Py_ssize_t step[5];
    for (int axis = 0; axis < 5; axis++)
        step[axis] = axis + first < 0 ? 0 : w->strides[axis + first];
    for (Py_ssize_t left = 0; left < job->outer; left += panel_width)
        for (Py_ssize_t row = 0; row < k; row++, b += panel_width) {
            const Py_ssize_t at = row / inner, x = at % job->kernel[2], line = at / job->kernel[2];
            const char *from = (const char *)w->buf + line / job->kernel[1] * step[0] + line % job->kernel[1] * step[1] +
                               x * step[2] + row % inner * step[3] + left * step[4];
            for (Py_ssize_t i = 0; i < MIN(panel_width, job->outer - left); i++)
                b[i] = *(const T *)(from + i * step[4]);
        }
    for (Py_ssize_t i = 0; i < job->outer && bias != NULL; i++)
        b[i] = ((const T *)bias->buf)[i];
}
