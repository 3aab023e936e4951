/* Depthwise convolutions of any stride and dilation; part of _cells.c.

   A row of outputs is the sum of a few rows of inputs, each shifted and multiplied by a weight per channel: vectors of
   channels (of several cells, if there are few) stay in registers while all cells of a window are added. */

#ifdef WINOGRAD
static void each_shares(void *argument) {
    Depthwise *job = argument;
    const Py_ssize_t num_rows = job->y.extent[0] * job->y.extent[1] * job->y.extent[2];
    for (Py_ssize_t part; (part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->shares;)
        job->run(job, job->sums + part * job->share_bytes, num_rows * part / job->shares,
                 num_rows * (part + 1) / job->shares);
}

/* Describe the arrays in the job; 0: they are not supported, or this CPU has no kernels for them. */
static int describe_depthwise(Depthwise *job, int for_weights, const Py_buffer *x, const Py_buffer *w,
                              const Py_buffer *y) {
    const int is_double = has_type(x, 'd'), last = x->ndim - 1;
    const Py_ssize_t size = x->itemsize, channels = x->shape[last];
    if (!(has_type(x, 'f') || is_double) || !describe_cells(&job->x, x, x) || !describe_cells(&job->y, y, x) ||
        w->ndim != x->ndim || !is_contiguous(w) || !has_type(w, is_double ? 'd' : 'f') || x->shape[0] != y->shape[0] ||
        y->shape[last] != channels || w->shape[last] != channels || w->shape[last - 1] != 1)
        return 0;
    job->channels = channels;
    job->taps = 1;
    for (int axis = 0; axis < 3; axis++) {
        const int at = axis + last - 4;
        job->kernel[axis] = at < 0 ? 1 : w->shape[at];
        job->taps *= job->kernel[axis];
        const Py_ssize_t span = (job->kernel[axis] - 1) * job->dilation[axis] + 1, extent = job->x.extent[axis + 1];
        const Py_ssize_t out = job->y.extent[axis + 1], s = job->stride[axis];
        if (s < 1 || job->dilation[axis] < 1 || (!job->is_backward && out && (out - 1) * s + span > extent))
            return 0;
    }
    const int use_avx512 = has_avx512() && channels >= 64 / size;
    const Py_ssize_t lanes = (use_avx512 ? 64 : 32) / size;
    const int is_contiguous_row =
        job->x.step[3] == channels * size && job->y.step[3] == channels * size && job->stride[2] == 1;
    job->tap_width = channels < lanes ? channels * lanes : channels;
    if (job->taps < 1 || job->taps > TAPS || channels < 1 ||
        (channels < lanes && (for_weights || !is_contiguous_row)) || (!use_avx512 && !has_avx2()))
        return 0;
    job->run =
        for_weights ? SIZED(depthwise_weights, use_avx512, is_double) : SIZED(depthwise_rows, use_avx512, is_double);
    return 1;
}

/* Run the job, whose elements for each channel are at w and bias; -1: no memory. */
static int run_depthwise(Depthwise *job, const Py_buffer *w, char *gradient, const char *bias, int threads,
                         Start start) {
    const Py_ssize_t cell = job->channels * w->itemsize, num_copies = job->tap_width / job->channels;
    const Py_ssize_t rows = job->y.extent[0] * job->y.extent[1] * job->y.extent[2];
    const int use_threads = start != NULL && threads > 1 && rows * job->y.extent[3] * job->channels >= MIN_THREADED;
    job->shares = use_threads ? (gradient == NULL ? 4 * threads : threads) : 1;
    job->share_bytes = gradient == NULL ? 0 : job->taps * cell;
    char *buffer = calloc(1, gradient == NULL ? (job->taps + 1) * cell * num_copies : job->shares * job->share_bytes);
    if (buffer == NULL)
        return -1;
    job->sums = buffer;
    for (Py_ssize_t i = 0; i < (job->taps + (bias != NULL)) * num_copies && gradient == NULL; i++) {
        const Py_ssize_t tap = i / num_copies;
        memcpy(buffer + i * cell, tap < job->taps ? (const char *)w->buf + tap * cell : bias, cell);
    }
    job->w = buffer;
    job->bias = bias == NULL ? NULL : buffer + job->taps * cell * num_copies;
    if (use_threads)
        start(each_shares, job, threads, 0);
    else
        each_shares(job);
    if (gradient != NULL) {
        add_shares(buffer, job->shares, job->share_bytes, w->itemsize);
        memcpy(gradient, buffer, job->share_bytes);
    }
    free(buffer);
    return 0;
}

PyDoc_STRVAR(depthwise_doc,
             "depthwise(pass_kind, x, weights, y, bias, stride, dilation, before, threads, start)\n--\n\n"
             "Write a depthwise convolution or its gradients; return False if the arrays are not supported.\n\n"
             "Parameters\n----------\n"
             "pass_kind : int\n    0: y = the valid convolution of x; 1: the gradient of weights from that of y; 2: y = the\n"
             "    gradient of the input from that of the output, x.\n"
             "x, y : array (N, *extent, C)\n    Of two or three axes.\n"
             "weights : array (*kernel, 1, C)\n"
             "bias : array (C,), or None\n"
             "stride, dilation : tuple of int\n    Of planes, rows and columns.\n"
             "before : tuple of int\n    If pass_kind is 2: numbers of the input's first planes, rows and columns that y omits.\n"
             "threads, start : int\n    Number of threads, and the address of GOMP_parallel (0: none).\n");

static PyObject *depthwise(PyObject *self, PyObject *args) {
    PyObject *arrays[4];
    Py_buffer views[4];
    int pass_kind, threads, acquired = 0, done = 0;
    unsigned long long start;
    Depthwise job = {0};
    Py_ssize_t *s = job.stride, *d = job.dilation, *b = job.before;
    if (!PyArg_ParseTuple(args, "iOOOO(nnn)(nnn)(nnn)iK", &pass_kind, arrays, arrays + 1, arrays + 2, arrays + 3, s,
                          s + 1, s + 2, d, d + 1, d + 2, b, b + 1, b + 2, &threads, &start))
        return NULL;
    const int count = arrays[3] == Py_None ? 3 : 4;
    if ((acquired = acquire_buffers(arrays, views, count, pass_kind == 1 ? 2 : 4)) < count)
        goto end;
    job.is_backward = pass_kind == 2;
    const Py_buffer *bias = count > 3 ? views + 3 : NULL;
    if (describe_depthwise(&job, pass_kind == 1, views, views + 1, views + 2) &&
        (bias == NULL || (bias->ndim == 1 && is_contiguous(bias) && bias->shape[0] == job.channels &&
                          bias->itemsize == views->itemsize))) {
        char *elements = bias == NULL ? NULL : bias->buf;
        Py_BEGIN_ALLOW_THREADS;
        char *gradient = pass_kind == 1 ? views[1].buf : NULL;
        done = run_depthwise(&job, views + 1, gradient, elements, threads, (Start)(size_t)start) ? -1 : 1;
        Py_END_ALLOW_THREADS;
    }
end:
    return release_and_return(views, acquired, done);
}
#endif
