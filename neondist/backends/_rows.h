/* Convolutions, and the gradients of their weights, by products of matrices, without gathering: each row of inputs that
   the windows of a row of outputs use is contiguous, whatever the stride; part of _cells.c. */

#ifdef WINOGRAD
/* Process shares until none are left; run by every thread. */
static void rows_shares(void *argument) {
    Rows *job = argument;
    for (Py_ssize_t part; (part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->shares;)
        job->run(job, job->sums + part * job->share_bytes, job->num_rows * part / job->shares,
                 job->num_rows * (part + 1) / job->shares);
}

/* Describe the arrays in the job; 0: they are not supported, or this CPU has no kernels for them. */
static int describe_rows(Rows *job, const Py_buffer *x, const Py_buffer *dy, const Py_buffer *dw) {
    const int last = x->ndim - 1, is_double = has_type(x, 'd');
    if (!(has_type(x, 'f') || is_double) || !describe_cells(&job->x, x, x) || !describe_cells(&job->y, dy, x) ||
        dw->ndim != x->ndim || !is_contiguous(dw) || !has_type(dw, is_double ? 'd' : 'f') ||
        x->shape[0] != dy->shape[0])
        return 0;
    const Py_ssize_t inner = x->shape[last], size = x->itemsize;
    job->outer = dy->shape[last];
    for (int axis = 0; axis < 3; axis++) {
        const int kernel_axis = axis + last - 4;
        job->kernel[axis] = kernel_axis < 0 ? 1 : dw->shape[kernel_axis];
        const Py_ssize_t span = (job->kernel[axis] - 1) * job->dilation[axis] + 1;
        const Py_ssize_t out = job->y.extent[axis + 1];
        if (out && (out - 1) * job->stride[axis] + span > job->x.extent[axis + 1])
            return 0;
    }
    job->length = job->kernel[2] * inner;
    job->share_bytes = job->kernel[0] * job->kernel[1] * job->length * job->outer * size;
    job->num_rows = job->y.extent[0] * job->y.extent[1] * job->y.extent[2];
    const int use_avx512 = has_avx512() && job->outer * size % 64 == 0,
              use_avx2 = has_avx2() && job->outer * size % 32 == 0;
    job->run = SIZED(rows_back, use_avx512, is_double);
    const int is_row_contiguous = job->kernel[2] == 1 || (job->x.step[3] == inner * size && job->dilation[2] == 1);
    return (use_avx512 || use_avx2) && is_row_contiguous && dw->shape[last - 1] == inner &&
           dw->shape[last] == job->outer;
}

PyDoc_STRVAR(weights_doc,
             "weights(x, dy, gradient, stride, dilation, threads, start)\n--\n\n"
             "Write the gradient of a valid convolution's weights; return False if the arrays are not supported.\n\n"
             "Parameters\n----------\n"
             "x, dy : array (N, *extent, C), (N, *out, C')\n    Of two or three axes, C' filling vectors.\n"
             "gradient : array (*kernel, C, C')\n"
             "stride, dilation : tuple of int\n    For planes, rows and columns; the dilation of columns must be 1.\n"
             "threads, start : int\n    Number of threads, and the address of GOMP_parallel (0: none).\n");

static PyObject *weights(PyObject *self, PyObject *args) {
    PyObject *arrays[3];
    Py_buffer views[3];
    int threads, acquired = 0, done = 0;
    unsigned long long start;
    Rows job = {0};
    Py_ssize_t *s = job.stride, *d = job.dilation;
    if (!PyArg_ParseTuple(args, "OOO(nnn)(nnn)iK", arrays, arrays + 1, arrays + 2, s, s + 1, s + 2, d, d + 1, d + 2,
                          &threads, &start))
        return NULL;
    if ((acquired = acquire_buffers(arrays, views, 3, 4)) < 3)
        goto end;
    if (describe_rows(&job, views, views + 1, views + 2)) {
        Py_BEGIN_ALLOW_THREADS;
        job.shares = start == 0 || job.num_rows * job.y.extent[3] * job.outer < MIN_THREADED ? 1 : threads;
        job.sums = calloc(1, job.shares * job.share_bytes + 1);
        done = job.sums == NULL ? -1 : 1;
        if (job.sums != NULL && job.shares > 1)
            ((Start)(size_t)start)(rows_shares, &job, threads, 0);
        else if (job.sums != NULL)
            rows_shares(&job);
        if (done > 0) {
            add_shares(job.sums, job.shares, job.share_bytes, views->itemsize);
            memcpy(views[2].buf, job.sums, job.share_bytes);
        }
        free(job.sums);
        Py_END_ALLOW_THREADS;
    }
end:
    return release_and_return(views, acquired, done);
}

/* Describe the arrays in the job; 0: they are not supported, or this CPU has no kernels for them. */
static int describe_convolution(Rows *job, const Py_buffer *x, const Py_buffer *w, const Py_buffer *y,
                                const Py_buffer *bias) {
    const int last = x->ndim - 1, first = w->ndim - 5, is_double = has_type(x, 'd');
    if (!(has_type(x, 'f') || is_double) || !has_type(w, is_double ? 'd' : 'f') || w->ndim != x->ndim ||
        !describe_cells(&job->x, x, x) || !describe_cells(&job->y, y, x) || x->shape[0] != y->shape[0] ||
        (size_t)w->buf % w->itemsize)
        return 0;
    const Py_ssize_t size = x->itemsize;
    job->inner = x->shape[last];
    job->outer = y->shape[last];
    for (int axis = 0; axis < 3; axis++)
        job->kernel[axis] = axis + first < 0 ? 1 : w->shape[axis + first];
    for (int axis = 0; axis < w->ndim; axis++)
        if (w->strides[axis] % size)
            return 0;
    const int is_row_contiguous = job->dilation[2] == 1 && job->x.step[3] == job->inner * size;
    job->length = is_row_contiguous ? job->kernel[2] * job->inner : job->inner;
    job->pieces = job->kernel[0] * job->kernel[1] * (is_row_contiguous ? 1 : job->kernel[2]);
    job->num_rows = job->y.extent[0] * job->y.extent[1] * job->y.extent[2];
    const int use_avx512 = has_avx512() && job->outer * size > 32;
    job->run = SIZED(rows, use_avx512, is_double);
    job->panel = (use_avx512 ? 128 : 64) / size;
    return (use_avx512 || has_avx2()) && job->pieces <= PIECES && w->shape[last - 1] == job->inner &&
           w->shape[last] == job->outer &&
           (bias == NULL || (bias->ndim == 1 && is_contiguous(bias) && bias->shape[0] == job->outer &&
                             has_type(bias, is_double ? 'd' : 'f')));
}

PyDoc_STRVAR(convolve_doc,
             "convolve(x, weights, y, bias, stride, dilation, before, threads, start)\n--\n\n"
             "Write a convolution plus bias; return False if the arrays are not supported.\n\n"
             "Parameters\n----------\n"
             "x, y : array (N, *extent, C), (N, *out, C')\n    Of two or three axes; cells outside x count as 0.\n"
             "weights : array (*kernel, C, C')\n"
             "bias : array (C',), or None\n"
             "stride, dilation, before : tuple of int\n"
             "    For planes, rows and columns; before: number of cells before x at which the first window begins.\n"
             "threads, start : int\n    Number of threads, and the address of GOMP_parallel (0: none).\n");

static PyObject *convolve(PyObject *self, PyObject *args) {
    PyObject *arrays[4];
    Py_buffer views[4];
    int threads, acquired = 0, done = 0;
    unsigned long long start;
    Rows job = {0};
    Py_ssize_t *s = job.stride, *d = job.dilation, *b = job.before;
    if (!PyArg_ParseTuple(args, "OOOO(nnn)(nnn)(nnn)iK", arrays, arrays + 1, arrays + 2, arrays + 3, s, s + 1, s + 2, d,
                          d + 1, d + 2, b, b + 1, b + 2, &threads, &start))
        return NULL;
    const int count = arrays[3] == Py_None ? 3 : 4;
    if ((acquired = acquire_buffers(arrays, views, count, 4)) < count)
        goto end;
    const Py_buffer *x = views, *w = views + 1, *bias = count > 3 ? views + 3 : NULL;
    if (describe_convolution(&job, x, w, views + 2, bias)) {
        Py_BEGIN_ALLOW_THREADS;
        const Py_ssize_t panels = (job.outer + job.panel - 1) / job.panel * job.panel, k = job.pieces * job.length;
        const int use_avx512 = job.panel * x->itemsize == 128, is_double = has_type(x, 'd');
        char *buffer = calloc(1, (k + 1) * panels * x->itemsize + ALIGNMENT);
        done = buffer == NULL ? -1 : 1;
        if (buffer != NULL) {
            job.sums = buffer + ALIGNMENT - (size_t)buffer % ALIGNMENT;
            SIZED(panels, use_avx512, is_double)(&job, w, bias, job.sums);
            const int use_threads = start != 0 && job.num_rows * job.y.extent[3] * job.outer * k >= MIN_THREADED;
            job.shares = use_threads ? MIN(job.num_rows, 8 * threads) : 1;
            if (use_threads)
                ((Start)(size_t)start)(rows_shares, &job, threads, 0);
            else
                rows_shares(&job);
        }
        free(buffer);
        Py_END_ALLOW_THREADS;
    }
end:
    return release_and_return(views, acquired, done);
}
#endif
