/* Max pooling (N, *spatial, C), for up to three spatial axes, in one pass over memory; part of _cells.c. */

enum { LAST = 3, WIDE = 16, NONE = 255 }; /* axis of a row; least number of channels that fill vectors; no position */

/* The samples, and missing spatial axes, are axes with windows of one cell. */
typedef struct {
    int back, fused_relu, disjoint, itemsize; /* disjoint: windows do not overlap, and cover all cells of a row */
    char *x, *y;              /* x and y, or their gradients */
    unsigned char *positions; /* position of the maximum in its window, in y's order */
    Py_ssize_t extent[LAST + 1], out[LAST + 1], x_step[LAST + 1], y_step[LAST + 1];
    Py_ssize_t kernel[LAST + 1], stride[LAST + 1], channels;
    Py_ssize_t rows[LAST], shares, next;
} Pool;

#define T float
#define INT int32_t
#define NAME(x) x##_float
#include "_pool_typed.h"
#undef T
#undef INT
#undef NAME
#define T double
#define INT int64_t
#define NAME(x) x##_double
#include "_pool_typed.h"
#undef T
#undef INT
#undef NAME

static void pool_shares(void *argument) {
    Pool *job = argument;
    const Py_ssize_t all = job->rows[0] * job->rows[1] * job->rows[2];
    for (Py_ssize_t share; (share = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->shares;)
        for (Py_ssize_t i = all * share / job->shares; i < all * (share + 1) / job->shares; i++) {
            Py_ssize_t at[LAST] = {i / job->rows[2] / job->rows[1], i / job->rows[2] % job->rows[1], i % job->rows[2]};
            (job->itemsize == sizeof(float) ? pool_row_float : pool_row_double)(job, at);
        }
}

/* Describe the arrays and windows in the job; 0: they are not supported. */
static int describe_pool(Pool *job, const Py_buffer *x, const Py_buffer *y, const Py_buffer *positions) {
    const int last = x->ndim - 1, axes = last - 1;
    if (axes < 1 || axes > LAST || y->ndim != x->ndim || positions->ndim != x->ndim || !(is(x, 'f') || is(x, 'd')) ||
        !is(y, is(x, 'f') ? 'f' : 'd') || !is(positions, 'B') || !whole(positions))
        return 0;
    job->itemsize = (int)x->itemsize;
    job->channels = x->shape[last];
    Py_ssize_t window = 1;
    for (int a = 0; a <= LAST; a++) {
        const int axis = a ? a - LAST + axes : 0, there = a == 0 || axis > 0;
        job->extent[a] = there ? x->shape[axis] : 1;
        job->out[a] = there ? y->shape[axis] : 1;
        job->x_step[a] = there ? x->strides[axis] : 0;
        job->y_step[a] = there ? y->strides[axis] : 0;
        const Py_ssize_t k = job->kernel[a], s = job->stride[a];
        if (k < 1 || k > 256 || s < 1 || (window *= k) > (job->fused_relu ? NONE : 256) ||
            job->out[a] != (job->extent[a] < k ? 0 : (job->extent[a] - k) / s + 1))
            return 0;
        job->disjoint = (a == 0 || job->disjoint) && (a == LAST ? s == k : s >= k);
    }
    for (int axis = 0; axis <= last; axis++)
        if (x->strides[axis] % x->itemsize || y->strides[axis] % y->itemsize ||
            positions->shape[axis] != y->shape[axis])
            return 0;
    return y->shape[last] == job->channels && (size_t)x->buf % x->itemsize == 0 && (size_t)y->buf % y->itemsize == 0 &&
           (job->channels < 2 || (x->strides[last] == x->itemsize && y->strides[last] == y->itemsize));
}

PyDoc_STRVAR(max_pool_doc,
             "max_pool(back, fused_relu, x, y, positions, kernel, stride, threads, start)\n--\n\n"
             "Write the maxima of windows and their positions, or the gradient of x; return False if unsupported.\n\n"
             "Parameters\n----------\n"
             "back : bool\n    Whether to write the gradient of x into x, given that of y as y.\n"
             "fused_relu : bool\n    Whether maxima that are not positive have no position, and thus no gradient.\n"
             "x : array (N, *extent, C)\n"
             "y : array (N, *out, C)\n    Of the same dtype.\n"
             "positions : array (N, *out, C) of uint8\n    Row-major position of the first maximum, or of the last NaN.\n"
             "kernel, stride : tuple of int\n    For up to three axes; up to 256 cells.\n"
             "threads, start : int\n    Number of threads, and the address of GOMP_parallel (0: none).\n");

static PyObject *max_pool(PyObject *self, PyObject *args) {
    PyObject *arrays[3], *sizes[2];
    Py_buffer views[3];
    int threads, acquired = 0, fits = 0;
    unsigned long long start;
    Pool job = {.kernel = {1, 1, 1, 1}, .stride = {1, 1, 1, 1}};
    if (!PyArg_ParseTuple(args, "ppOOOO!O!iK", &job.back, &job.fused_relu, arrays, arrays + 1, arrays + 2,
                          &PyTuple_Type, sizes, &PyTuple_Type, sizes + 1, &threads, &start))
        return NULL;
    const Py_ssize_t axes = PyTuple_Size(sizes[0]);
    for (Py_ssize_t axis = 0; axis < axes && axes <= LAST && axes == PyTuple_Size(sizes[1]); axis++) {
        const Py_ssize_t a = LAST + 1 - axes + axis;
        job.kernel[a] = PyNumber_AsSsize_t(PyTuple_GetItem(sizes[0], axis), PyExc_OverflowError);
        job.stride[a] = PyNumber_AsSsize_t(PyTuple_GetItem(sizes[1], axis), PyExc_OverflowError);
        if (PyErr_Occurred())
            return NULL;
    }
    if ((acquired = acquire_buffers(arrays, views, 3, job.back ? 1 : 2 | 4)) < 3)
        goto end;
    fits = axes == views[0].ndim - 2 && axes == PyTuple_Size(sizes[1]) && describe_pool(&job, views, views + 1, views + 2);
    if (fits) {
        job.x = views[0].buf;
        job.y = views[1].buf;
        job.positions = views[2].buf;
        for (int a = 0; a < LAST; a++)
            job.rows[a] = job.back ? job.extent[a] : job.out[a];
        if (job.back) /* groups of `stride` rows, each beginning with the first row of a window */
            job.rows[2] = (job.extent[2] + job.stride[2] - 1) / job.stride[2];
        else if (job.out[LAST] == 0)
            job.rows[0] = 0;
        const int several = start != 0 && threads > 1 && views[0].len / job.itemsize >= MIN_THREADED;
        job.shares = several ? 4 * threads : 1; /* threads are not equally fast */
        Py_BEGIN_ALLOW_THREADS;
        if (several)
            ((Start)(size_t)start)(pool_shares, &job, threads, 0);
        else
            pool_shares(&job);
        Py_END_ALLOW_THREADS;
    }
end:
    while (acquired > 0)
        PyBuffer_Release(views + --acquired);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(fits);
}
