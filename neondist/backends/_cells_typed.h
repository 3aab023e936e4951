/* Kernels for elements of one type T, and their loops over a share of the cells; included once for each type. */

/* Some rows of elements of every array: the cells of a run, with several cells in a row if they are adjacent. */
typedef struct {
    T *at[ARRAYS];
    Py_ssize_t step[ARRAYS], rows, width; /* elements from one row to the next, and in a row */
    const T *coefficient[COEFFICIENTS];   /* a row of each */
    T *sum[SUMS];                         /* a row of each */
    T lower_bound;
} NAME(Rows);

#define ROW(n) (q->at[n] + r * q->step[n])
#define EACH_ROW for (Py_ssize_t r = 0; r < q->rows; r++)
#define EACH_ELEMENT IVDEP for (Py_ssize_t i = 0; i < q->width; i++)
#define CLIPPED(z) ((z) < lower_bound ? lower_bound : (z)) /* NaN is kept */

CLONES static void NAME(clip)(const NAME(Rows) * q) {
    const T lower_bound = q->lower_bound;
    EACH_ROW {
        const T *x = ROW(0);
        T *y = ROW(1);
        EACH_ELEMENT y[i] = CLIPPED(x[i]);
    }
}

CLONES static void NAME(clip_back)(const NAME(Rows) * q) {
    const T lower_bound = q->lower_bound;
    EACH_ROW {
        const T *y = ROW(0), *dy = ROW(1);
        T *dx = ROW(2);
        EACH_ELEMENT dx[i] = y[i] <= lower_bound ? 0 : dy[i];
    }
}

CLONES static void NAME(add)(const NAME(Rows) * q) {
    const T lower_bound = q->lower_bound;
    EACH_ROW {
        const T *a = ROW(0), *b = ROW(1);
        T *y = ROW(2);
        EACH_ELEMENT {
            const T z = a[i] + b[i];
            y[i] = CLIPPED(z);
        }
    }
}

CLONES static void NAME(total)(const NAME(Rows) * q) {
    T *sum = q->sum[0];
    EACH_ROW {
        const T *x = ROW(0);
        EACH_ELEMENT sum[i] += x[i];
    }
}

/* Sums of differences from a value near the mean, and of their squares. */
CLONES static void NAME(moments)(const NAME(Rows) * q) {
    const T *origin_row = q->coefficient[0];
    T *sum = q->sum[0], *squares = q->sum[1];
    EACH_ROW {
        const T *x = ROW(0);
        EACH_ELEMENT {
            const T d = x[i] - origin_row[i];
            sum[i] += d;
            squares[i] += d * d;
        }
    }
}

CLONES static void NAME(normalise)(const NAME(Rows) * q) {
    const T *mean = q->coefficient[0], *scale = q->coefficient[1], *shift = q->coefficient[2],
            lower_bound = q->lower_bound;
    EACH_ROW {
        const T *x = ROW(0);
        T *y = ROW(1);
        EACH_ELEMENT {
            const T z = (x[i] - mean[i]) * scale[i] + shift[i];
            y[i] = CLIPPED(z);
        }
    }
}

CLONES static void NAME(normalise_sums)(const NAME(Rows) * q) {
    const T *mean = q->coefficient[0], *scale = q->coefficient[1], *shift = q->coefficient[2],
            lower_bound = q->lower_bound;
    T *sum = q->sum[0], *dz_d_sum = q->sum[1];
    EACH_ROW {
        const T *x = ROW(0), *dy = ROW(1);
        EACH_ELEMENT {
            const T d = x[i] - mean[i], z = d * scale[i] + shift[i], dz = z <= lower_bound ? 0 : dy[i];
            sum[i] += dz;
            dz_d_sum[i] += dz * d;
        }
    }
}

CLONES static void NAME(normalise_back)(const NAME(Rows) * q) {
    const T *mean = q->coefficient[0], *scale = q->coefficient[1], *shift = q->coefficient[2],
            lower_bound = q->lower_bound;
    const T *dz_factor = q->coefficient[3], *deviation_factor = q->coefficient[4], *offset = q->coefficient[5];
    EACH_ROW {
        const T *x = ROW(0), *dy = ROW(1);
        T *dx = ROW(2);
        EACH_ELEMENT {
            const T d = x[i] - mean[i], z = d * scale[i] + shift[i], dz = z <= lower_bound ? 0 : dy[i];
            dx[i] = dz_factor[i] * dz + deviation_factor[i] * d + offset[i];
        }
    }
}

static void (*const NAME(kernels)[KERNELS])(const NAME(Rows) *) = {
    NAME(clip), NAME(clip_back), NAME(add), NAME(total), NAME(moments), NAME(normalise), NAME(normalise_sums),
    NAME(normalise_back),
};

/* Run a kernel on the first `cells` cells of piece `i` of a group; return the number of cells processed. */
static Py_ssize_t NAME(piece)(const Job *job, int kernel, NAME(Rows) * q, Py_ssize_t group, Py_ssize_t i,
                              Py_ssize_t cells) {
    const Py_ssize_t start = i % job->pieces * job->chunk, n = MIN(cells, job->cells - start);
    const Py_ssize_t elements = n * job->channels;
    Py_ssize_t run = i / job->pieces, offset[ARRAYS] = {0};
    for (int axis = job->axes - 1; axis >= 0; axis--) {
        for (int a = 0; a < job->arrays; a++)
            offset[a] += run % job->extent[axis] * job->stride[a][axis];
        run /= job->extent[axis];
    }
    for (int a = 0; a < job->arrays; a++) {
        q->at[a] = (T *)(job->data[a] + group * job->group_step[a] + offset[a] + start * job->step[a]);
        q->step[a] = job->adjacent ? job->width : job->step[a] / (Py_ssize_t)sizeof(T);
    }
    q->rows = job->adjacent ? elements / job->width : n;
    q->width = job->adjacent ? job->width : job->channels;
    NAME(kernels)[kernel](q);
    if (job->adjacent && elements % job->width) {
        for (int a = 0; a < job->arrays; a++)
            q->at[a] += q->rows * job->width;
        q->rows = 1;
        q->width = elements % job->width;
        NAME(kernels)[kernel](q);
    }
    return n;
}

/* Repeat the elements of the channels along a row. */
static void NAME(repeat_channels)(const Job *job, T *row, const T *elements) {
    for (Py_ssize_t i = 0; i < job->width; i += job->channels)
        memcpy(row + i, elements, job->channels * sizeof(T));
}

/* Add a row's sums to those of the channels, and reset them: short sums are of type T, long sums of type double. */
static void NAME(add_row_sums)(const Job *job, T *row, double *sums) {
    for (Py_ssize_t i = 0; i < job->width; i += job->channels)
        for (Py_ssize_t c = 0; c < job->channels; c++)
            sums[c] += row[i + c];
    memset(row, 0, job->width * sizeof(T));
}

/* The moments of pieces lo to hi, block after block. With the mean of an eighth of a block as the origin, a block's
   squares lose no more than three bits, however large the mean is; blocks are merged as by Chan et al. (1983). */
static void NAME(block_moments)(const Job *job, NAME(Rows) * q, T *origin_row, Py_ssize_t group, Py_ssize_t lo,
                                Py_ssize_t hi, double *totals) {
    const Py_ssize_t channels = job->channels;
    const Py_ssize_t length = MAX(1, BLOCK / (MIN(job->chunk, job->cells) * channels));
    double *first = totals + 1 + 2 * channels, *sums = first + channels, *squares = sums + channels;
    T *origin = (T *)(squares + channels);
    for (; lo < hi; lo += length) {
        const Py_ssize_t stop = MIN(lo + length, hi), sample_stop = lo + (stop - lo + 7) / 8;
        const Py_ssize_t part = stop - lo > 1 ? job->chunk : (MIN(job->chunk, job->cells) + 7) / 8;
        Py_ssize_t num_sampled = 0, n = 0;
        memset(first, 0, 3 * channels * sizeof(double));
        for (Py_ssize_t i = lo; i < sample_stop; i++)
            num_sampled += NAME(piece)(job, TOTAL, q, group, i, part);
        NAME(add_row_sums)(job, q->sum[0], first);
        for (Py_ssize_t c = 0; c < channels; c++)
            origin[c] = (T)(first[c] / num_sampled);
        NAME(repeat_channels)(job, origin_row, origin);
        for (Py_ssize_t i = lo; i < stop; i++)
            n += NAME(piece)(job, MOMENTS, q, group, i, job->chunk);
        NAME(add_row_sums)(job, q->sum[0], sums);
        NAME(add_row_sums)(job, q->sum[1], squares);
        for (Py_ssize_t c = 0; c < channels; c++) {
            squares[c] -= sums[c] * sums[c] / n;
            sums[c] = origin[c] + sums[c] / n;
        }
        merge(totals, n, sums, squares, channels);
    }
}

static void NAME(share)(const Job *job, Py_ssize_t number) {
    const Py_ssize_t group = number / job->shares, share = number % job->shares, all = job->runs * job->pieces;
    const Py_ssize_t lo = all * share / job->shares, hi = all * (share + 1) / job->shares;
    double *totals = job->totals + number * job->totals_length;
    T *row = (T *)(job->rows + number * job->row_bytes);
    NAME(Rows) q = {.lower_bound = (T)job->lower_bound};
    for (int n = 0; n < job->coefficients; n++, row += job->width) {
        NAME(repeat_channels)(job, row, (const T *)job->coefficient_rows + (n * job->groups + group) * job->channels);
        q.coefficient[n] = row;
    }
    for (int n = 0; n < job->sums; n++, row += job->width)
        q.sum[n] = row;
    if (job->kernel == MOMENTS) {
        q.coefficient[0] = row;
        NAME(block_moments)(job, &q, row, group, lo, hi, totals);
        return;
    }
    for (Py_ssize_t i = lo, elements = 0; i < hi; i++) {
        elements += NAME(piece)(job, job->kernel, &q, group, i, job->chunk) * job->channels;
        if (elements < BLOCK && i + 1 < hi)
            continue;
        elements = 0;
        for (int n = 0; n < job->sums; n++)
            NAME(add_row_sums)(job, q.sum[n], totals + 1 + n * job->channels);
    }
}

#undef ROW
#undef EACH_ROW
#undef EACH_ELEMENT
#undef CLIPPED
