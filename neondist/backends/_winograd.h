/* Convolutions 3 x 3 and 5 x 5, or d x 3 x 3 and d x 5 x 5, of stride 1 by Winograd's F(2 x 2, 3 x 3) and F(2 x 2, 5 x 5)
   (Lavin and Gray 2016): 2.25 and 2.78 times fewer products; part of _cells.c.

   A tile is 2 x 2 outputs and the 4 x 4 or 6 x 6 cells that they see: y = A^T [sum over channels of (G w G^T) (B^T x B)]
   A, so that there are 16 or 36 products of matrices (tiles, channels). A block of tiles stays in the cache for all
   steps. */

#if defined(__x86_64__) && defined(__GNUC__)
#define WINOGRAD

enum { LINE = 64, SCRATCH = 1 << 19, MOST = 144, AT_ONCE = 16 }; /* bytes; of V and M; tiles; rows of weights */

typedef struct {
    char *at;
    Py_ssize_t extent[4], step[4]; /* of samples, planes, rows, cells */
} Cells;

struct transforms;

/* U, V and M consist of side * side parts each, which are `apart` elements apart. */
typedef struct {
    int back, lanes, weights, kernel; /* weights: the stage */
    const struct transforms *transforms;
    Cells x, y;
    char *w, *u, *scratch;
    const void *bias;
    Py_ssize_t before[3], w_step[5], depth, inner, outer, k, tiles[2]; /* k: rows of the matrix (k, outer) */
    Py_ssize_t v_row, m_row, u_row, v_apart, m_apart, u_apart, longest;
    Py_ssize_t all, block, shares, room, u_room; /* tiles; bytes of a thread's scratch, a share's dU */
    Py_ssize_t parts, next, arrived; /* of the current stage */
} Winograd;

typedef struct {
    Py_ssize_t n, d, h, w;
} Place;

/* Position of the first cell of a row, which is counted over all planes and samples. */
static inline Place row_at(const Cells *all, Py_ssize_t row) {
    const Py_ssize_t plane = row / all->extent[2];
    return (Place){plane / all->extent[1], plane % all->extent[1], row % all->extent[2], 0};
}

static inline char *line_at(const Cells *all, Py_ssize_t n, Py_ssize_t d, Py_ssize_t h) {
    return all->at + n * all->step[0] + d * all->step[1] + h * all->step[2];
}

/* Set the position of tile t's first output; unless `first`, `at` is the position of tile t - 1. */
static inline void place(const Winograd *job, Place *at, Py_ssize_t t, int first) {
    at->w += 2;
    if (!first && at->w < job->y.extent[3])
        return;
    const Py_ssize_t row = t / job->tiles[1], plane = row / job->tiles[0];
    at->w = t % job->tiles[1] * 2;
    at->h = row % job->tiles[0] * 2;
    at->d = plane % job->y.extent[1];
    at->n = plane / job->y.extent[1];
}

/* The addresses of `side` x `side` cells `d` planes, `h` rows and `w` columns after a place; `outside` for others. */
static inline void cells(const Cells *all, const Place *at, Py_ssize_t d, Py_ssize_t h, Py_ssize_t w, const int side,
                         char *outside, char **addresses) {
    char *plane = all->at + at->n * all->step[0] + (at->d + d) * all->step[1];
    const int seen = at->d + d >= 0 && at->d + d < all->extent[1];
    h += at->h;
    w += at->w;
    for (int i = 0; i < side; i++) {
        const int row = seen && h + i >= 0 && h + i < all->extent[2];
        char *cell = plane + (h + i) * all->step[2] + w * all->step[3];
        for (int j = 0; j < side; j++, cell += all->step[3])
            *addresses++ = row && w + j >= 0 && w + j < all->extent[3] ? cell : outside;
    }
}

/* A job of _rows.h. A window's row is one piece of memory, or each of its cells is; a piece has `length` elements. */
typedef struct {
    Cells x, y; /* y, or its gradient */
    Py_ssize_t kernel[3], stride[3], dilation[3], before[3], inner, outer, length, pieces;
    Py_ssize_t all, shares, next, room, panel; /* rows of y; bytes of a share's sums; elements of a panel's row */
    void (*run)(const void *, void *, Py_ssize_t, Py_ssize_t);
    char *sums; /* or weights in panels */
} Rows;

typedef struct {
    const char *at; /* the row of x */
    Py_ssize_t column, first; /* of the window of output 0; the row of the matrix of weights */
} Piece;

enum { PIECES = 128 };

/* A job of _depthwise.h: y is the convolution of x or, if `back`, the input's gradient, given the output's as x. */
typedef struct depthwise {
    Cells x, y;
    Py_ssize_t kernel[3], stride[3], dilation[3], before[3], channels, wide, taps; /* wide: elements of w for a tap */
    Py_ssize_t shares, next, room;
    int back;
    char *w, *bias, *sums;
    void (*run)(const struct depthwise *, void *, Py_ssize_t, Py_ssize_t);
} Depthwise;

enum { TAPS = 512 };

/* Plane, row or column of x, inside or outside, that output `at` reads with a tap; 0: none, in the gradient. */
static inline int find_input(const Depthwise *job, const int axis, Py_ssize_t at, Py_ssize_t tap, Py_ssize_t *from) {
    const Py_ssize_t s = job->stride[axis], shift = tap * job->dilation[axis];
    if (!job->back) {
        *from = at * s + shift - job->before[axis];
        return 1;
    }
    const Py_ssize_t inside = at + job->before[axis] - shift, rest = (inside % s + s) % s;
    *from = (inside - rest) / s;
    return rest == 0;
}

enum { AT_A_TIME = 128 }; /* outputs of a row, which stay in the first-level cache */

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
#define SIZED(x, wide, is_double) \
    ((wide) ? ((is_double) ? x##_double3_512 : x##_float3_512) : ((is_double) ? x##_double3_256 : x##_float3_256))

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
    char *scratch = job->scratch + __atomic_fetch_add(&job->arrived, 1, __ATOMIC_RELAXED) * job->room;
    for (Py_ssize_t part; (part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->parts;) {
        if (job->weights) {
            const Py_ssize_t lo = part * AT_ONCE, hi = MIN(lo + AT_ONCE, job->k);
            (job->back ? job->transforms->weights_back : job->transforms->weights)(job, job->u, lo, hi);
            continue;
        }
        char *u = job->u + (job->back ? part * job->u_room : 0);
        const Py_ssize_t hi = job->all * (part + 1) / job->parts;
        for (Py_ssize_t lo = job->all * part / job->parts; lo < hi; lo += job->block)
            job->transforms->tiles(job, scratch, u, lo, MIN(lo + job->block, hi));
    }
}

static void winograd_stage(Winograd *job, int weights, Py_ssize_t parts, int threads, Start start) {
    job->weights = weights;
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
    job->all = job->y.extent[0] * job->y.extent[1] * job->tiles[0] * job->tiles[1];
    if (start == NULL || job->all * job->inner * job->outer < MIN_THREADED)
        threads = 1;
    job->v_row = (job->k + lanes - 1) / lanes * lanes;
    job->m_row = job->u_row = (job->outer + lanes - 1) / lanes * lanes;
    job->longest = MAX(job->v_row, job->m_row);
    const Py_ssize_t fit = SCRATCH / parts / (job->v_row + job->m_row) / size, even = job->all / threads / 2 + 1;
    job->block = MIN(MAX(24, MIN(MOST, fit / 12 * 12)), even); /* 12 is a multiple of all ROWS */
    job->shares = job->back ? threads : (job->all + job->block - 1) / job->block;
    job->v_apart = job->block * job->v_row + lanes;
    job->m_apart = job->block * job->m_row + lanes;
    job->u_apart = job->k * ((job->u_row + lanes) / (2 * lanes)) * 2 * lanes + lanes; /* panels are of two vectors */
    job->room = (parts * (job->v_apart + job->m_apart) + 2 * job->longest) * size;
    job->u_room = parts * job->u_apart * size;
    char *room = calloc(1, threads * job->room + (job->back ? job->shares : 1) * job->u_room + LINE);
    if (room == NULL)
        return -1;
    job->scratch = room + LINE - (size_t)room % LINE;
    job->u = job->scratch + threads * job->room;
    const Py_ssize_t rows = (job->k + AT_ONCE - 1) / AT_ONCE;
    if (!job->back)
        winograd_stage(job, 1, rows, threads, start);
    winograd_stage(job, 0, job->shares, threads, start);
    if (job->back)
        winograd_stage(job, 1, rows, threads, start);
    free(room);
    return 0;
}

/* Describe cells (N, *spatial, C) with two or three spatial axes; 0: they are not supported. */
static int describe_cells(Cells *all, const Py_buffer *view, const Py_buffer *like) {
    const int last = view->ndim - 1;
    if (last < 3 || last > 4 || view->ndim != like->ndim || !is(view, is(like, 'f') ? 'f' : 'd') ||
        (size_t)view->buf % view->itemsize || view->strides[last] != view->itemsize)
        return 0;
    all->at = view->buf;
    for (int a = 0; a < 4; a++) {
        const int axis = a && last == 3 ? a - 1 : a, there = a != 1 || last == 4;
        all->extent[a] = there ? view->shape[axis] : 1;
        all->step[a] = there ? view->strides[axis] : 0;
        if (all->step[a] % view->itemsize)
            return 0;
    }
    return 1;
}

/* Describe the arrays in the job; 0: they are not supported, or this CPU has no kernels for them. */
static int describe_winograd(Winograd *job, const Py_buffer *x, const Py_buffer *w, const Py_buffer *y) {
    const int first = w->ndim - 5, last = x->ndim - 1;
    int wide = has_avx512();
    if (!(is(x, 'f') || is(x, 'd')) || !is(w, is(x, 'f') ? 'f' : 'd') || w->ndim != x->ndim ||
        !describe_cells(&job->x, x, x) || !describe_cells(&job->y, y, x))
        return 0;
    job->inner = x->shape[last];
    job->outer = y->shape[last];
    wide = wide && MIN(job->inner, job->outer) >= 64 / x->itemsize; /* fewer channels fill no such vector */
    if (!wide && !has_avx2())
        return 0;
    job->kernel = (int)w->shape[1 + first];
    job->transforms = &TRANSFORMS[job->kernel == 5][wide][is(x, 'd')];
    job->lanes = (wide ? 64 : 32) / x->itemsize;
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

PyDoc_STRVAR(winograd_doc,
             "winograd(back, x, weights, y, bias, before, threads, start)\n--\n\n"
             "Write a convolution of stride 1, or its weights' gradient; return False if the arrays are not supported.\n\n"
             "Parameters\n----------\n"
             "back : bool\n    Whether to write the gradient of the weights into weights, given that of y as y.\n"
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
    if (!PyArg_ParseTuple(args, "pOOOO(nnn)iK", &job.back, arrays, arrays + 1, arrays + 2, arrays + 3, before,
                          before + 1, before + 2, &threads, &start))
        return NULL;
    const int count = arrays[3] == Py_None ? 3 : 4;
    if ((acquired = acquire_buffers(arrays, views, count, job.back ? 2 : 4)) < count)
        goto end;
    const Py_buffer *x = views, *bias = views + 3;
    int fits = describe_winograd(&job, x, views + 1, views + 2);
    if (fits && count > 3) {
        fits = bias->ndim == 1 && whole(bias) && bias->shape[0] == job.outer && is(bias, is(x, 'f') ? 'f' : 'd');
        job.bias = bias->buf;
    }
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        done = run_winograd(&job, x->itemsize, threads, (Start)(size_t)start) ? -1 : 1;
        Py_END_ALLOW_THREADS;
    }
end:
    return release_and_return(views, acquired, done);
}
#endif
