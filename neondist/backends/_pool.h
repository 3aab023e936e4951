/* Max pooling (N, *spatial, C), for up to three spatial axes, in one pass over memory; part of _cells.c. */

enum { LAST_AXIS = 3, MIN_VECTOR_CHANNELS = 16, NO_POSITION = 255 };

/* The samples, and missing spatial axes, are axes with windows of one cell. */
typedef struct {
    int is_backward, fused_relu, is_disjoint,
        itemsize;             /* is_disjoint: windows do not overlap, and cover all cells of a row */
    char *x, *y;              /* x and y, or their gradients */
    unsigned char *positions; /* position of the maximum in its window, in y's order */
    Py_ssize_t extent[LAST_AXIS + 1], out[LAST_AXIS + 1], x_step[LAST_AXIS + 1], y_step[LAST_AXIS + 1];
    Py_ssize_t kernel[LAST_AXIS + 1], stride[LAST_AXIS + 1], channels;
    Py_ssize_t rows[LAST_AXIS], shares, next;
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
    const Py_ssize_t num_rows = job->rows[0] * job->rows[1] * job->rows[2];
    for (Py_ssize_t share; (share = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->shares;)
        for (Py_ssize_t i = num_rows * share / job->shares; i < num_rows * (share + 1) / job->shares; i++) {
            Py_ssize_t at[LAST_AXIS] = {i / job->rows[2] / job->rows[1], i / job->rows[2] % job->rows[1],
                                        i % job->rows[2]};
            (job->itemsize == sizeof(float) ? pool_row_float : pool_row_double)(job, at);
        }
}

/* Describe the arrays and windows in the job; 0: they are not supported. */
static int describe_pool(Pool *job, const Py_buffer *x, const Py_buffer *y, const Py_buffer *positions) {
    const int last = x->ndim - 1, axes = last - 1;
    if (axes < 1 || axes > LAST_AXIS || y->ndim != x->ndim || positions->ndim != x->ndim ||
        !(has_type(x, 'f') || has_type(x, 'd')) || !has_type(y, has_type(x, 'f') ? 'f' : 'd') ||
        !has_type(positions, 'B') || !is_contiguous(positions))
        return 0;
    job->itemsize = (int)x->itemsize;
    job->channels = x->shape[last];
    Py_ssize_t window = 1;
    for (int a = 0; a <= LAST_AXIS; a++) {
        const int axis = a ? a - LAST_AXIS + axes : 0, exists = a == 0 || axis > 0;
        job->extent[a] = exists ? x->shape[axis] : 1;
        job->out[a] = exists ? y->shape[axis] : 1;
        job->x_step[a] = exists ? x->strides[axis] : 0;
        job->y_step[a] = exists ? y->strides[axis] : 0;
        const Py_ssize_t k = job->kernel[a], s = job->stride[a];
        if (k < 1 || k > 256 || s < 1 || (window *= k) > (job->fused_relu ? NO_POSITION : 256) ||
            job->out[a] != (job->extent[a] < k ? 0 : (job->extent[a] - k) / s + 1))
            return 0;
        job->is_disjoint = (a == 0 || job->is_disjoint) && (a == LAST_AXIS ? s == k : s >= k);
    }
    for (int axis = 0; axis <= last; axis++)
        if (x->strides[axis] % x->itemsize || y->strides[axis] % y->itemsize ||
            positions->shape[axis] != y->shape[axis])
            return 0;
    return y->shape[last] == job->channels && (size_t)x->buf % x->itemsize == 0 && (size_t)y->buf % y->itemsize == 0 &&
           (job->channels < 2 || (x->strides[last] == x->itemsize && y->strides[last] == y->itemsize));
}

PyDoc_STRVAR(
    max_pool_doc,
    "max_pool(is_backward, fused_relu, x, y, positions, kernel, stride, threads, start)\n--\n\n"
    "Write the maxima of windows and their positions, or the gradient of x; return False if unsupported.\n\n"
    "Parameters\n----------\n"
    "is_backward : bool\n    Whether to write the gradient of x into x, given that of y as y.\n"
    "fused_relu : bool\n    Whether maxima that are not positive have no position, and thus no gradient.\n"
    "x : array (N, *extent, C)\n"
    "y : array (N, *out, C)\n    Of the same dtype.\n"
    "positions : array (N, *out, C) of uint8\n    Row-major position of the first maximum, or of the last NaN.\n"
    "kernel, stride : tuple of int\n    For up to three axes; up to 256 cells.\n"
    "threads, start : int\n    Number of threads, and the address of GOMP_parallel (0: none).\n");

static PyObject *max_pool(PyObject *self, PyObject *args) {
    PyObject *arrays[3], *sizes[2];
    Py_buffer views[3];
    int threads, acquired = 0, is_supported = 0;
    unsigned long long start;
    Pool job = {.kernel = {1, 1, 1, 1}, .stride = {1, 1, 1, 1}};
    if (!PyArg_ParseTuple(args, "ppOOOO!O!iK", &job.is_backward, &job.fused_relu, arrays, arrays + 1, arrays + 2,
                          &PyTuple_Type, sizes, &PyTuple_Type, sizes + 1, &threads, &start))
        return NULL;
    const Py_ssize_t axes = PyTuple_Size(sizes[0]);
    for (Py_ssize_t axis = 0; axis < axes && axes <= LAST_AXIS && axes == PyTuple_Size(sizes[1]); axis++) {
        const Py_ssize_t a = LAST_AXIS + 1 - axes + axis;
        job.kernel[a] = PyNumber_AsSsize_t(PyTuple_GetItem(sizes[0], axis), PyExc_OverflowError);
        job.stride[a] = PyNumber_AsSsize_t(PyTuple_GetItem(sizes[1], axis), PyExc_OverflowError);
        if (PyErr_Occurred())
            return NULL;
    }
    if ((acquired = acquire_buffers(arrays, views, 3, job.is_backward ? 1 : 2 | 4)) < 3)
        goto end;
    is_supported =
        axes == views[0].ndim - 2 && axes == PyTuple_Size(sizes[1]) && describe_pool(&job, views, views + 1, views + 2);
    if (is_supported) {
        job.x = views[0].buf;
        job.y = views[1].buf;
        job.positions = views[2].buf;
        for (int a = 0; a < LAST_AXIS; a++)
            job.rows[a] = job.is_backward ? job.extent[a] : job.out[a];
        if (job.is_backward) /* groups of `stride` rows, each beginning with the first row of a window */
            job.rows[2] = (job.extent[2] + job.stride[2] - 1) / job.stride[2];
        else if (job.out[LAST_AXIS] == 0)
            job.rows[0] = 0;
        const int use_threads = start != 0 && threads > 1 && views[0].len / job.itemsize >= MIN_THREADED;
        job.shares = use_threads ? 4 * threads : 1; /* threads are not equally fast */
        Py_BEGIN_ALLOW_THREADS;
        if (use_threads)
            ((Start)(size_t)start)(pool_shares, &job, threads, 0);
        else
            pool_shares(&job);
        Py_END_ALLOW_THREADS;
    }
end:
    while (acquired > 0)
        PyBuffer_Release(views + --acquired);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_supported);
}
