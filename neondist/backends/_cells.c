/* Kernels over the cells of channels-last arrays (N, *spatial, C), each in one pass over memory.

   The elements of a cell must be contiguous in every array; other axes may have any strides, as in the middle of a halo
   buffer. The kernels are compiled ahead of time, since a compiler at run time (numba) costs every rank 0.4 s and
   60 MB; without them, NumPy and PyTorch compute the same in more passes (cells.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define IVDEP _Pragma("GCC ivdep") /* an output is an input, or does not overlap it */
#else
#define IVDEP
#endif
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum { ARRAYS = 3, COEFFICIENTS = 6, SUMS = 2, AXES = 8 };
enum { BLOCK = 8192, ROW = 512, MIN_THREADED = 1 << 15 }; /* elements: in the cache; in a row; worth several threads */

enum { CLIP, CLIP_BACK, ADD, TOTAL, MOMENTS, NORMALISE, NORMALISE_SUMS, NORMALISE_BACK, KERNELS };
static const struct {
    const char *name;
    int inputs, outputs, coefficients, sums;
} KINDS[KERNELS] = {
    {"clip", 1, 1, 0, 0},           {"clip_back", 2, 1, 0, 0},      {"add", 2, 1, 0, 0},
    {"total", 1, 0, 0, 1},          {"moments", 1, 0, 0, 2},        {"normalise", 1, 1, 3, 0},
    {"normalise_sums", 2, 0, 3, 2}, {"normalise_back", 2, 1, 6, 0},
};

/* Groups (samples, or one group of all) of runs of equally spaced cells; a run is cut into pieces of `chunk`
   cells, and a group into shares for threads. */
typedef struct {
    int kernel, arrays, coefficients, sums, axes, itemsize, adjacent;
    char *data[ARRAYS];
    Py_ssize_t extent[AXES], stride[ARRAYS][AXES], group_step[ARRAYS], step[ARRAYS];
    Py_ssize_t groups, runs, cells, channels, chunk, pieces, width, shares, next;
    const void *coefficient_rows;
    double lower_bound, *totals; /* for every share: a count, and sums of the channels */
    Py_ssize_t totals_length, row_bytes;
    char *rows;
} Job;

/* Merge count, means and sums of squared differences of n more cells into `totals`. */
static void merge(double *totals, double n, const double *mean, const double *squares, Py_ssize_t channels) {
    const double before = totals[0], all = before + n, weight = all ? n / all : 0;
    double *means = totals + 1, *all_squares = means + channels;
    totals[0] = all;
    for (Py_ssize_t c = 0; c < channels; c++) {
        const double d = mean[c] - means[c];
        means[c] += d * weight;
        all_squares[c] += squares[c] + d * d * before * weight;
    }
}

#define T float
#define NAME(x) x##_float
#include "_cells_typed.h"
#undef T
#undef NAME
#define T double
#define NAME(x) x##_double
#include "_cells_typed.h"
#undef T
#undef NAME

/* Process shares until none are left; run by every thread. */
static void process_shares(void *argument) {
    Job *job = argument;
    const Py_ssize_t all = job->groups * job->shares;
    for (Py_ssize_t number; (number = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < all;)
        (job->itemsize == sizeof(float) ? share_float : share_double)(job, number);
}

typedef void (*Start)(void (*)(void *), void *, unsigned, unsigned);

/* Run the job, and add the results of its shares; -1: no memory. */
static int run_job(Job *job, double *sums, int threads, Start start) {
    const Py_ssize_t channels = job->channels, group_cells = job->runs * job->cells;
    int use_threads = start != NULL && threads > 1 && job->groups * group_cells * channels >= MIN_THREADED;
    job->shares = use_threads && job->groups % threads ? threads : 1;
    const Py_ssize_t all = job->groups * job->shares;
    /* moments need memory for the moments of a block, and for its origin */
    job->totals_length = job->sums ? 1 + (job->kernel == MOMENTS ? 6 : job->sums) * channels : 0;
    job->row_bytes = (job->coefficients + job->sums + (job->kernel == MOMENTS)) * job->width * job->itemsize;
    job->row_bytes = (job->row_bytes + 63) & ~(Py_ssize_t)63;
    job->totals = calloc(all * job->totals_length + 1, sizeof(double));
    job->rows = calloc(all * job->row_bytes + 1, 1);
    if (job->totals == NULL || job->rows == NULL) {
        free(job->totals);
        free(job->rows);
        return -1;
    }
    if (use_threads)
        start(process_shares, job, MIN((Py_ssize_t)threads, all), 0);
    else
        process_shares(job);
    for (Py_ssize_t number = 0; number < all && job->sums; number++) {
        double *totals = job->totals + number * job->totals_length;
        double *group_totals = job->totals + number / job->shares * job->shares * job->totals_length;
        if (totals != group_totals && job->kernel == MOMENTS && totals[0])
            merge(group_totals, totals[0], totals + 1, totals + 1 + channels, channels);
        else if (totals != group_totals && job->kernel != MOMENTS)
            for (Py_ssize_t i = 1; i < job->totals_length; i++)
                group_totals[i] += totals[i];
    }
    for (Py_ssize_t group = 0; group < job->groups && job->sums; group++)
        memcpy(sums + group * job->sums * channels, job->totals + group * job->shares * job->totals_length + 1,
               job->sums * channels * sizeof(double));
    free(job->totals);
    free(job->rows);
    return 0;
}

static int has_type(const Py_buffer *view, char letter) {
    const char *format = view->format;
    return format != NULL && (*format == '@' || *format == '=' ? format[1] : format[0]) == letter;
}

static int is_contiguous(const Py_buffer *view) { return PyBuffer_IsContiguous(view, 'C'); }

/* Describe the arrays in the job; 0: they are not supported. */
static int describe(Job *job, const Py_buffer *views) {
    const Py_buffer *first = views;
    const int last = first->ndim - 1, by_sample = job->groups > 1 || (last > 0 && first->shape[0] == 1);
    if (last < 1 || last > AXES || !(has_type(first, 'f') || has_type(first, 'd')))
        return 0;
    job->itemsize = (int)first->itemsize;
    job->channels = first->shape[last];
    if (job->groups > 1 && job->groups != first->shape[0])
        return 0;
    for (int a = 0; a < job->arrays; a++) {
        const Py_buffer *view = views + a;
        if (view->ndim != first->ndim || !has_type(view, has_type(first, 'f') ? 'f' : 'd') ||
            (size_t)view->buf % view->itemsize)
            return 0;
        for (int axis = 0; axis <= last; axis++)
            if (view->shape[axis] != first->shape[axis] || view->strides[axis] % view->itemsize)
                return 0;
        if (job->channels > 1 && view->strides[last] != view->itemsize)
            return 0;
        job->data[a] = view->buf;
        job->group_step[a] = by_sample ? view->strides[0] : 0;
    }
    /* axes that are adjacent in all arrays are merged; the last axis is the axis of a run */
    job->axes = 0;
    for (int axis = by_sample; axis < last; axis++) {
        const Py_ssize_t extent = first->shape[axis];
        if (extent == 1)
            continue;
        int joins = job->axes > 0;
        for (int a = 0; a < job->arrays; a++)
            joins = joins && job->stride[a][job->axes - 1] == views[a].strides[axis] * extent;
        if (!joins)
            job->extent[job->axes++] = 1;
        job->extent[job->axes - 1] *= extent;
        for (int a = 0; a < job->arrays; a++)
            job->stride[a][job->axes - 1] = views[a].strides[axis];
    }
    const Py_ssize_t cell = job->channels * job->itemsize;
    job->axes -= job->axes > 0;
    const int inner = job->axes;
    const int any = inner > 0 || last - by_sample > 0;
    job->cells = 1;
    job->adjacent = 1;
    job->runs = 1;
    for (int axis = by_sample; axis < last; axis++)
        job->cells *= first->shape[axis];
    for (int axis = 0; axis < inner; axis++) {
        job->runs *= job->extent[axis];
        if (job->extent[axis])
            job->cells /= job->extent[axis];
    }
    for (int a = 0; a < job->arrays; a++) {
        job->step[a] = any && job->cells > 1 ? job->stride[a][inner] : cell;
        job->adjacent = job->adjacent && job->step[a] == cell;
    }
    const int rows = job->coefficients || job->sums;
    const Py_ssize_t wide = job->adjacent ? MAX(1, (rows ? ROW : BLOCK) / MAX(1, job->channels)) : 1;
    job->width = wide * job->channels;
    job->chunk = MAX(1, BLOCK / MAX(1, job->width)) * wide;
    job->pieces = (job->cells + job->chunk - 1) / job->chunk;
    return 1;
}

PyDoc_STRVAR(run_doc, "run(kernel, arrays, coefficients, sums, lower_bound, threads, start)\n--\n\n"
                      "Run a kernel; return False if the arrays are not supported.\n\n"
                      "Parameters\n----------\n"
                      "kernel : str\n"
                      "arrays : tuple of array (N, *spatial, C)\n    Inputs and outputs, of one shape and dtype.\n"
                      "coefficients : array (count, groups, C), or None\n    Of the same dtype.\n"
                      "sums : array (groups, count, C) of float64, or None\n    Receives the sums.\n"
                      "lower_bound : float\n    Lower bound of the outputs; backward kernels drop the gradients of "
                      "outputs at this bound.\n"
                      "threads, start : int\n    Number of threads, and the address of GOMP_parallel (0: none).\n");

/* Acquire the arrays' buffers, writable if the array's bit in `written` is set; return how many were acquired. */
static int acquire_buffers(PyObject *const *arrays, Py_buffer *views, int count, unsigned written) {
    int acquired = 0;
    for (; acquired < count; acquired++) {
        const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (written >> acquired & 1 ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(arrays[acquired], views + acquired, flags))
            break;
    }
    return acquired;
}

/* Release the acquired buffers; return whether the job is done, or raise MemoryError if `done` is below 0. */
static PyObject *release_and_return(Py_buffer *views, int acquired, int done) {
    while (acquired > 0)
        PyBuffer_Release(views + --acquired);
    if (done < 0)
        return PyErr_NoMemory();
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

static PyObject *run(PyObject *self, PyObject *args) {
    const char *name;
    PyObject *arrays, *coefficients, *sums;
    double lower_bound;
    int threads, kernel = 0, done = 0, is_supported, acquired = 0;
    unsigned long long start;
    if (!PyArg_ParseTuple(args, "sO!OOdiK", &name, &PyTuple_Type, &arrays, &coefficients, &sums, &lower_bound, &threads,
                          &start))
        return NULL;
    while (kernel < KERNELS && strcmp(KINDS[kernel].name, name) != 0)
        kernel++;
    if (kernel == KERNELS || PyTuple_Size(arrays) != KINDS[kernel].inputs + KINDS[kernel].outputs)
        return PyErr_Format(PyExc_ValueError, "kernel '%s' is unknown, or takes another number of arrays", name);
    Job job = {.kernel = kernel, .lower_bound = lower_bound, .groups = 1};
    job.arrays = (int)PyTuple_Size(arrays);
    job.coefficients = KINDS[kernel].coefficients;
    job.sums = KINDS[kernel].sums;
    Py_buffer views[ARRAYS + 2], *factors = NULL, *totals = NULL;
    for (; acquired < job.arrays; acquired++) {
        const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (acquired >= KINDS[kernel].inputs ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(PyTuple_GetItem(arrays, acquired), views + acquired, flags))
            goto end;
    }
    if (job.coefficients) {
        if (PyObject_GetBuffer(coefficients, views + acquired, PyBUF_STRIDES | PyBUF_FORMAT))
            goto end;
        factors = views + acquired++;
    }
    if (job.sums) {
        if (PyObject_GetBuffer(sums, views + acquired, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE))
            goto end;
        totals = views + acquired++;
    }
    is_supported =
        (factors == NULL || (factors->ndim == 3 && is_contiguous(factors) && factors->shape[0] == job.coefficients)) &&
        (totals == NULL ||
         (totals->ndim == 3 && is_contiguous(totals) && totals->shape[1] == job.sums && has_type(totals, 'd')));
    if (is_supported && (factors != NULL || totals != NULL))
        job.groups = factors != NULL ? factors->shape[1] : totals->shape[0];
    is_supported =
        is_supported && (factors == NULL || totals == NULL || totals->shape[0] == job.groups) && describe(&job, views);
    is_supported =
        is_supported && (factors == NULL || (factors->shape[2] == job.channels && has_type(factors, views->format[0])));
    is_supported = is_supported && (totals == NULL || totals->shape[2] == job.channels);
    if (is_supported) {
        job.coefficient_rows = factors == NULL ? NULL : factors->buf;
        double *wanted = totals == NULL ? NULL : totals->buf;
        Py_BEGIN_ALLOW_THREADS;
        done = 1;
        if (views->len)
            done = run_job(&job, wanted, threads, (Start)(size_t)start) ? -1 : 1;
        else if (totals != NULL)
            memset(wanted, 0, totals->len);
        Py_END_ALLOW_THREADS;
    }
end:
    return release_and_return(views, acquired, done);
}

#include "_pool.h"
#include "_winograd.h"
#include "_rows.h"
#include "_depthwise.h"

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, run_doc},
    {"max_pool", max_pool, METH_VARARGS, max_pool_doc},
#ifdef WINOGRAD
    {"winograd", winograd, METH_VARARGS, winograd_doc},
    {"convolve", convolve, METH_VARARGS, convolve_doc},
    {"weights", weights, METH_VARARGS, weights_doc},
    {"depthwise", depthwise, METH_VARARGS, depthwise_doc},
#endif
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_cells", "Kernels over the cells of channels-last arrays.", 0, methods, NULL, NULL, NULL,
    NULL};

PyMODINIT_FUNC PyInit__cells(void) { return PyModuleDef_Init(&module); }
