/* Convolutions 3 x 3 and 5 x 5, or d x 3 x 3 and d x 5 x 5, of stride 1 by Winograd's F(2 x 2, 3 x 3) and F(2 x 2, 5 x 5)
   (Lavin and Gray 2016): 2.25 and 2.78 times fewer products; part of _cells.c.

   A tile is 2 x 2 outputs and the 4 x 4 or 6 x 6 cells that they see: y = A^T [sum over channels of (G w G^T) (B^T x B)]
   A, so that there are 16 or 36 products of matrices (tiles, channels). A block of tiles stays in the cache for all
   steps. */

#if defined(__x86_64__) && defined(__GNUC__)
#define WINOGRAD

enum {
    ALIGNMENT = 64,
    SCRATCH_BYTES = 1 << 19,
    MAX_BLOCK = 144,
    ROWS_PER_PART = 16
}; /* MAX_BLOCK: tiles; rows: of weights */

typedef struct {
    char *at;
    Py_ssize_t extent[4], step[4]; /* of samples, planes, rows, cells */
} Cells;

struct transforms;

/* U, V and M consist of side * side parts each, which are `*_part_stride` elements apart. */
typedef struct {
    int is_backward, lanes, transforms_weights, kernel; /* transforms_weights: in the current stage */
    const struct transforms *transforms;
    Cells x, y;
    char *w, *u, *scratch;
    const void *bias;
    Py_ssize_t before[3], w_step[5], depth, inner, outer, k, tiles[2]; /* k: rows of the matrix (k, outer) */
    Py_ssize_t v_row, m_row, u_row, v_part_stride, m_part_stride, u_part_stride, longest;
    Py_ssize_t num_tiles, block, shares, scratch_bytes, share_bytes; /* of a thread's scratch, of a share's dU */
    Py_ssize_t parts, next, arrived; /* of the current stage */
} Winograd;

typedef struct {
    Py_ssize_t n, d, h, w;
} Position;

/* Position of the first cell of a row, whose number is counted over all planes and samples. */
static inline Position row_at(const Cells *array, Py_ssize_t row) {
    const Py_ssize_t plane = row / array->extent[2];
    return (Position){plane / array->extent[1], plane % array->extent[1], row % array->extent[2], 0};
}

static inline char *line_at(const Cells *array, Py_ssize_t n, Py_ssize_t d, Py_ssize_t h) {
    return array->at + n * array->step[0] + d * array->step[1] + h * array->step[2];
}

/* Set the position of tile t's first output; unless `is_first`, it is the position of tile t - 1. */
static inline void set_tile_position(const Winograd *job, Position *at, Py_ssize_t t, int is_first) {
    at->w += 2;
    if (!is_first && at->w < job->y.extent[3])
        return;
    const Py_ssize_t row = t / job->tiles[1], plane = row / job->tiles[0];
    at->w = t % job->tiles[1] * 2;
    at->h = row % job->tiles[0] * 2;
    at->d = plane % job->y.extent[1];
    at->n = plane / job->y.extent[1];
}

/* The addresses of `side` x `side` cells `d` planes, `h` rows and `w` columns after a position; `outside` for others.
 */
static inline void cell_addresses(const Cells *array, const Position *at, Py_ssize_t d, Py_ssize_t h, Py_ssize_t w,
                                  const int side, char *outside, char **addresses) {
    char *plane = array->at + at->n * array->step[0] + (at->d + d) * array->step[1];
    const int has_plane = at->d + d >= 0 && at->d + d < array->extent[1];
    h += at->h;
    w += at->w;
    for (int i = 0; i < side; i++) {
        const int has_row = has_plane && h + i >= 0 && h + i < array->extent[2];
        char *cell = plane + (h + i) * array->step[2] + w * array->step[3];
        for (int j = 0; j < side; j++, cell += array->step[3])
            *addresses++ = has_row && w + j >= 0 && w + j < array->extent[3] ? cell : outside;
    }
}

/* A job of _rows.h. A window's row is one piece of memory, or each of its cells is; a piece has `length` elements. */
typedef struct {
    Cells x, y; /* y, or its gradient */
    Py_ssize_t kernel[3], stride[3], dilation[3], before[3], inner, outer, length, pieces;
    Py_ssize_t num_rows, shares, next, share_bytes, panel; /* of y; of a share's sums; elements of a panel's row */
    void (*run)(const void *, void *, Py_ssize_t, Py_ssize_t);
    char *sums; /* or weights in panels */
} Rows;

typedef struct {
    const char *at; /* the row of x */
    Py_ssize_t column, first; /* of the window of output 0; the row of the matrix of weights */
} Piece;

enum { PIECES = 128 };

/* A job of _depthwise.h: y is the convolution of x, or the gradient of the input, given that of the output as x. */
typedef struct depthwise {
    Cells x, y;
    Py_ssize_t kernel[3], stride[3], dilation[3], before[3], channels;
    Py_ssize_t tap_width, taps; /* tap_width: elements of w for a tap */
    Py_ssize_t shares, next, share_bytes;
    int is_backward;
    char *w, *bias, *sums;
    void (*run)(const struct depthwise *, void *, Py_ssize_t, Py_ssize_t);
} Depthwise;

enum { TAPS = 512 };

/* Plane, row or column of x, inside or outside, that output `at` reads with a tap; 0: none, in the gradient. */
static inline int find_input(const Depthwise *job, const int axis, Py_ssize_t at, Py_ssize_t tap, Py_ssize_t *from) {
    const Py_ssize_t s = job->stride[axis], shift = tap * job->dilation[axis];
    if (!job->is_backward) {
        *from = at * s + shift - job->before[axis];
        return 1;
    }
    const Py_ssize_t inside = at + job->before[axis] - shift, remainder = (inside % s + s) % s;
    *from = (inside - remainder) / s;
    return remainder == 0;
}

enum { CELLS_PER_PRODUCT = 128 }; /* outputs of a row, which stay in the first-level cache */

#define BYTES 64
#define ROWS 12
#define TARGET __attribute__((target("avx512f")))
#define NAMED(x, t) x##_##t##_512
#include "_winograd_sizes.h"
#undef BYTES
#undef ROWS
#undef TARGET
#undef NAMED
#define BYTES 32
#define ROWS 6
#define TARGET __attribute__((target("avx2,fma")))
#define NAMED(x, t) x##_##t##_256
#include "_winograd_sizes.h"
#undef BYTES
#undef ROWS
#undef TARGET
#undef NAMED

/* Features of this CPU. */
static int has_avx512(void) { return __builtin_cpu_supports("avx512f") != 0; }

static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* The function for vectors that are wide, and elements that are double. */
#define SIZED(x, use_avx512, is_double)                                                                                \
    ((use_avx512) ? ((is_double) ? x##_double3_512 : x##_float3_512) : ((is_double) ? x##_double3_256 : x##_float3_256))

/* Add the sums of all other shares, of `bytes` each, to the sums of the first share. */
static void add_shares(char *sums, Py_ssize_t shares, Py_ssize_t bytes, Py_ssize_t size) {
    for (Py_ssize_t share = 1; share < shares; share++)
        for (Py_ssize_t i = 0; i < bytes / size; i++)
            if (size == sizeof(float))
                ((float *)sums)[i] += ((float *)(sums + share * bytes))[i];
            else
                ((double *)sums)[i] += ((double *)(sums + share * bytes))[i];
}

static const struct transforms {
    void (*weights)(const Winograd *, void *, Py_ssize_t, Py_ssize_t);
    void (*weights_back)(const Winograd *, void *, Py_ssize_t, Py_ssize_t);
    void (*tiles)(const Winograd *, void *, void *, Py_ssize_t, Py_ssize_t);
} TRANSFORMS[2][2][2] = {
#define FOR(x) {weights_##x, weights_back_##x, tiles_##x}
    {{FOR(float3_256), FOR(double3_256)}, {FOR(float3_512), FOR(double3_512)}},
    {{FOR(float5_256), FOR(double5_256)}, {FOR(float5_512), FOR(double5_512)}},
#undef FOR
};

/* Process parts of the job's current stage until none are left; run by every thread. */
static void winograd_parts(void *argument) {
    Winograd *job = argument;
    char *scratch = job->scratch + __atomic_fetch_add(&job->arrived, 1, __ATOMIC_RELAXED) * job->scratch_bytes;
    for (Py_ssize_t part; (part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->parts;) {
        if (job->transforms_weights) {
            const Py_ssize_t lo = part * ROWS_PER_PART, hi = MIN(lo + ROWS_PER_PART, job->k);
            (job->is_backward ? job->transforms->weights_back : job->transforms->weights)(job, job->u, lo, hi);
            continue;
        }
        char *u = job->u + (job->is_backward ? part * job->share_bytes : 0);
        const Py_ssize_t hi = job->num_tiles * (part + 1) / job->parts;
        for (Py_ssize_t lo = job->num_tiles * part / job->parts; lo < hi; lo += job->block)
            job->transforms->tiles(job, scratch, u, lo, MIN(lo + job->block, hi));
    }
}

static void winograd_stage(Winograd *job, int transforms_weights, Py_ssize_t parts, int threads, Start start) {
    job->transforms_weights = transforms_weights;
    job->parts = parts;
    job->next = job->arrived = 0;
    if (threads > 1)
        start(winograd_parts, job, threads, 0);
    else
        winograd_parts(job);
}

/* Run the job; -1: no memory. */
static int run_winograd(Winograd *job, Py_ssize_t size, int threads, Start start) {
    const Py_ssize_t lanes = job->lanes, parts = (job->kernel + 1) * (job->kernel + 1);
    job->tiles[0] = (job->y.extent[2] + 1) / 2;
    job->tiles[1] = (job->y.extent[3] + 1) / 2;
    job->num_tiles = job->y.extent[0] * job->y.extent[1] * job->tiles[0] * job->tiles[1];
    if (start == NULL || job->num_tiles * job->inner * job->outer < MIN_THREADED)
        threads = 1;
    job->v_row = (job->k + lanes - 1) / lanes * lanes;
    job->m_row = job->u_row = (job->outer + lanes - 1) / lanes * lanes;
    job->longest = MAX(job->v_row, job->m_row);
    const Py_ssize_t max_tiles = SCRATCH_BYTES / parts / (job->v_row + job->m_row) / size,
                     tiles_per_thread = job->num_tiles / threads / 2 + 1;
    job->block = MIN(MAX(24, MIN(MAX_BLOCK, max_tiles / 12 * 12)), tiles_per_thread); /* 12 is a multiple of all ROWS */
    job->shares = job->is_backward ? threads : (job->num_tiles + job->block - 1) / job->block;
    job->v_part_stride = job->block * job->v_row + lanes;
    job->m_part_stride = job->block * job->m_row + lanes;
    job->u_part_stride =
        job->k * ((job->u_row + lanes) / (2 * lanes)) * 2 * lanes + lanes; /* panels are of two vectors */
    job->scratch_bytes = (parts * (job->v_part_stride + job->m_part_stride) + 2 * job->longest) * size;
    job->share_bytes = parts * job->u_part_stride * size;
    char *buffer =
        calloc(1, threads * job->scratch_bytes + (job->is_backward ? job->shares : 1) * job->share_bytes + ALIGNMENT);
    if (buffer == NULL)
        return -1;
    job->scratch = buffer + ALIGNMENT - (size_t)buffer % ALIGNMENT;
    job->u = job->scratch + threads * job->scratch_bytes;
    const Py_ssize_t rows = (job->k + ROWS_PER_PART - 1) / ROWS_PER_PART;
    if (!job->is_backward)
        winograd_stage(job, 1, rows, threads, start);
    winograd_stage(job, 0, job->shares, threads, start);
    if (job->is_backward)
        winograd_stage(job, 1, rows, threads, start);
    free(buffer);
    return 0;
}

/* Describe cells (N, *spatial, C) with two or three spatial axes; 0: they are not supported. */
static int describe_cells(Cells *array, const Py_buffer *view, const Py_buffer *like) {
    const int last = view->ndim - 1;
    if (last < 3 || last > 4 || view->ndim != like->ndim || !has_type(view, has_type(like, 'f') ? 'f' : 'd') ||
        (size_t)view->buf % view->itemsize || view->strides[last] != view->itemsize)
        return 0;
    array->at = view->buf;
    for (int a = 0; a < 4; a++) {
        const int axis = a && last == 3 ? a - 1 : a, exists = a != 1 || last == 4;
        array->extent[a] = exists ? view->shape[axis] : 1;
        array->step[a] = exists ? view->strides[axis] : 0;
        if (array->step[a] % view->itemsize)
            return 0;
    }
    return 1;
}

/* Describe the arrays in the job; 0: they are not supported, or this CPU has no kernels for them. */
static int describe_winograd(Winograd *job, const Py_buffer *x, const Py_buffer *w, const Py_buffer *y) {
    const int first = w->ndim - 5, last = x->ndim - 1;
    int use_avx512 = has_avx512();
    if (!(has_type(x, 'f') || has_type(x, 'd')) || !has_type(w, has_type(x, 'f') ? 'f' : 'd') || w->ndim != x->ndim ||
        !describe_cells(&job->x, x, x) || !describe_cells(&job->y, y, x))
        return 0;
    job->inner = x->shape[last];
    job->outer = y->shape[last];
    use_avx512 = use_avx512 && MIN(job->inner, job->outer) >= 64 / x->itemsize; /* fewer channels fill no such vector */
    if (!use_avx512 && !has_avx2())
        return 0;
    job->kernel = (int)w->shape[1 + first];
    job->transforms = &TRANSFORMS[job->kernel == 5][use_avx512][has_type(x, 'd')];
    job->lanes = (use_avx512 ? 64 : 32) / x->itemsize;
    for (int axis = 0; axis < 5; axis++) {
        job->w_step[axis] = axis + first < 0 ? 0 : w->strides[axis + first];
        if (job->w_step[axis] % x->itemsize)
            return 0;
    }
    job->w = w->buf;
    job->depth = first < 0 ? 1 : w->shape[0];
    job->k = job->depth * job->inner;
    return x->shape[0] == y->shape[0] && (job->kernel == 3 || job->kernel == 5) && w->shape[2 + first] == job->kernel &&
           job->depth > 0 && w->shape[3 + first] == job->inner && w->shape[4 + first] == job->outer &&
           (size_t)w->buf % w->itemsize == 0 && MIN(job->inner, job->outer) >= job->lanes;
}

PyDoc_STRVAR(
    winograd_doc,
    "winograd(is_backward, x, weights, y, bias, before, threads, start)\n--\n\n"
    "Write a convolution of stride 1, or its weights' gradient; return False if the arrays are not supported.\n\n"
    "Parameters\n----------\n"
    "is_backward : bool\n    Whether to write the gradient of the weights into weights, given that of y as y.\n"
    "x : array (N, *extent, C)\n    Of two or three axes; cells outside it count as 0.\n"
    "weights : array (k, k, C, C') or (depth, k, k, C, C'), k being 3 or 5\n"
    "y : array (N, *out, C')\n    x, weights and y are of one dtype.\n"
    "bias : array (C',), or None\n"
    "before : tuple of int\n    Numbers of planes, rows and columns before x at which the first window begins.\n"
    "threads, start : int\n    Number of threads, and the address of GOMP_parallel (0: none).\n");

static PyObject *winograd(PyObject *self, PyObject *args) {
    PyObject *arrays[4];
    Py_buffer views[4];
    int threads, acquired = 0, done = 0;
    unsigned long long start;
    Winograd job = {0};
    Py_ssize_t *before = job.before;
    if (!PyArg_ParseTuple(args, "pOOOO(nnn)iK", &job.is_backward, arrays, arrays + 1, arrays + 2, arrays + 3, before,
                          before + 1, before + 2, &threads, &start))
        return NULL;
    const int count = arrays[3] == Py_None ? 3 : 4;
    if ((acquired = acquire_buffers(arrays, views, count, job.is_backward ? 2 : 4)) < count)
        goto end;
    const Py_buffer *x = views, *bias = views + 3;
    int is_supported = describe_winograd(&job, x, views + 1, views + 2);
    if (is_supported && count > 3) {
        is_supported = bias->ndim == 1 && is_contiguous(bias) && bias->shape[0] == job.outer &&
                       has_type(bias, has_type(x, 'f') ? 'f' : 'd');
        job.bias = bias->buf;
    }
    if (is_supported) {
        Py_BEGIN_ALLOW_THREADS;
        done = run_winograd(&job, x->itemsize, threads, (Start)(size_t)start) ? -1 : 1;
        Py_END_ALLOW_THREADS;
    }
end:
    return release_and_return(views, acquired, done);
}
#endif
