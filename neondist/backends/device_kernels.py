"""CUDA C source of the GPU kernels, which CuPy compiles at first use.

T is the element type; INDEX is the type of counts and indices (32 bits are several times faster than 64): see
`specialise_source`. Kernels use grid-stride loops.
"""

from __future__ import annotations

C_TYPES = {"float32": "float", "float64": "double"}
C_TYPE_BY_ITEMSIZE = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
MAX_ARRAY_AXES = 8

_SOURCE_PREFIX = """
#ifndef KERNEL
#define KERNEL extern "C" __global__
#endif
#define EACH(i, total) \\
    (INDEX i = blockIdx.x * (INDEX)blockDim.x + threadIdx.x; i < (INDEX)(total); \\
     i += gridDim.x * (INDEX)blockDim.x)
"""

COPY_EACH = """
KERNEL void copy_each(const long long *table, long long rank, long long total) {
    const long long width = 3 + 3 * rank;
    for EACH(i, total) {
        const long long *row = table;
        long long rest = i, from = 0, to = 0;
        while (row[0] <= i) row += width;
        if (row != table) rest -= row[-width];
        for (long long axis = rank - 1; axis >= 0; axis--) {
            const long long n = row[3 + axis], at = rest % n;
            rest /= n;
            from += at * row[3 + rank + axis];
            to += at * row[3 + 2 * rank + axis];
        }
        ((T *)row[2])[to] = ((const T *)row[1])[from];
    }
}
"""
"""Copies several arrays into others, with any strides; each row of the table: end, addresses, shape, both strides"""

ADD_BOXES = """
KERNEL void add_boxes(T *array, const long long *table, long long boxes, long long rank, long long total) {
    const long long *strides = table, *rows = table + rank, width = 2 + 3 * rank;
    for EACH(i, total) {
        long long cell[AXES], box = 0, rest = i, place = 0;
        while (rows[box * width] <= i) box++;
        if (box) rest -= rows[(box - 1) * width];
        for (long long axis = rank - 1; axis >= 0; axis--) {
            const long long *row = rows + box * width + 2 + axis, n = row[rank];
            cell[axis] = row[0] + rest % n * row[2 * rank];
            rest /= n;
            place += cell[axis] * strides[axis];
        }
        T sum = array[place];
        int is_first = 1;
        for (long long other = 0; is_first && other < boxes; other++) {
            const long long *row = rows + other * width;
            long long inside = 1, at = 0;
            for (long long axis = 0; axis < rank; axis++) {
                const long long n = row[2 + rank + axis], step = row[2 + 2 * rank + axis];
                const long long off = cell[axis] - row[2 + axis];
                inside &= off >= 0 && off % step == 0 && off / step < n;
                at = at * n + off / step;
            }
            if (inside) {
                is_first = other >= box;
                sum += ((const T *)row[1])[at];
            }
        }
        if (is_first) array[place] = sum;
    }
}
"""
"""Adds boxes, which may overlap, to an array: the thread of a cell's first box adds the values of all boxes in order.

The table: strides of the array, then a row for each box: end, address of its elements, first cell, shape, steps
"""

MAX_POOL = """
KERNEL void max_pool(const T *x, T *best, unsigned char *place, const INDEX *table, long long total) {
    const INDEX *out = table + 3, *kernel = table + 6, *step = table + 9, *strides = table + 13;
    for EACH(i, total) {
        INDEX rest = i, at = 0;
        const T *first = x + rest % table[12] * strides[4];
        rest /= table[12];
        for (int axis = 2; axis >= 0; axis--) {
            first += rest % out[axis] * step[axis] * strides[axis + 1];
            rest /= out[axis];
        }
        first += rest * strides[0];
        T most = *first;
        unsigned char where = 0;
        for (INDEX a = 0; a < kernel[0]; a++)
            for (INDEX b = 0; b < kernel[1]; b++)
                for (INDEX c = 0; c < kernel[2]; c++, at++) {
                    const T value = first[a * strides[1] + b * strides[2] + c * strides[3]];
                    if (value > most) where = (unsigned char)at;
                    if (value > most || value != value) most = value;
                }
        best[i] = most;
        place[i] = where;
    }
}
"""
"""Maxima (N, *out, C), and their positions in windows; the table: extents, outputs, kernel, steps, C, strides of x"""

MAX_POOL_BACK = """
KERNEL void max_pool_back(const T *dy, const unsigned char *place, T *dx, const INDEX *table, long long total) {
    const INDEX *extent = table, *out = table + 3, *kernel = table + 6, *step = table + 9, channels = table[12];
    for EACH(i, total) {
        INDEX rest = i / channels, cell[3], lo[3], hi[3];
        for (int axis = 2; axis >= 0; axis--) {
            const INDEX at = cell[axis] = rest % extent[axis], before = at - kernel[axis] + step[axis];
            rest /= extent[axis];
            lo[axis] = before > 0 ? before / step[axis] : 0;
            hi[axis] = at / step[axis] < out[axis] ? at / step[axis] : out[axis] - 1;
        }
        T sum = 0;
        for (INDEX a = hi[0]; a >= lo[0]; a--)
            for (INDEX b = hi[1]; b >= lo[1]; b--)
                for (INDEX c = hi[2]; c >= lo[2]; c--) {
                    const INDEX window = ((rest * out[0] + a) * out[1] + b) * out[2] + c;
                    const INDEX at = ((cell[0] - a * step[0]) * kernel[1] + cell[1] - b * step[1]) * kernel[2]
                        + cell[2] - c * step[2];
                    if (place[window * channels + i % channels] == at) sum += dy[window * channels + i % channels];
                }
        dx[i] = sum;
    }
}
"""
"""Gradient of x (N, *extent, C), gathered for each cell from the windows that contain it; table: see MAX_POOL"""

DEPTHWISE = """
KERNEL void depthwise(const T *x, const T *weights, T *y, const INDEX *table, long long total) {
    const INDEX *out = table + 3, *kernel = table + 6, *step = table + 9, *strides = table + 13;
    const INDEX *dilation = table + 18, channels = table[21];
    for EACH(i, total) {
        const INDEX channel = i % channels;
        INDEX rest = i / channels, at = 0;
        const T *first = x + channel / (channels / table[12]) * strides[4];
        for (int axis = 2; axis >= 0; axis--) {
            first += rest % out[axis] * step[axis] * strides[axis + 1];
            rest /= out[axis];
        }
        first += rest * strides[0];
        T sum = 0;
        for (INDEX a = 0; a < kernel[0]; a++)
            for (INDEX b = 0; b < kernel[1]; b++)
                for (INDEX c = 0; c < kernel[2]; c++, at++)
                    sum += weights[at * channels + channel] * first[a * dilation[0] * strides[1]
                        + b * dilation[1] * strides[2] + c * dilation[2] * strides[3]];
        y[i] = sum;
    }
}
"""
"""Depthwise convolution (N, *out, C_out); table: see MAX_POOL; then dilations and C_out"""

DEPTHWISE_BACK = """
KERNEL void depthwise_back(const T *dy, const T *weights, T *dx, const INDEX *table, long long total) {
    const INDEX *extent = table, *out = table + 3, *kernel = table + 6, *step = table + 9, *dilation = table + 18;
    const INDEX channels = table[21], per_channel = channels / table[12];
    for EACH(i, total) {
        const INDEX channel = i % table[12] * per_channel;
        INDEX rest = i / table[12], cell[3];
        for (int axis = 2; axis >= 0; axis--) {
            cell[axis] = rest % extent[axis];
            rest /= extent[axis];
        }
        T sum = 0;
        for (INDEX at = 0; at < kernel[0] * kernel[1] * kernel[2]; at++) {
            INDEX place = at, window = rest, contains = 1, steps[3];
            for (int axis = 2; axis >= 0; axis--) {
                const INDEX from = cell[axis] - place % kernel[axis] * dilation[axis];
                place /= kernel[axis];
                steps[axis] = from / step[axis];
                contains &= from >= 0 && from % step[axis] == 0 && steps[axis] < out[axis];
            }
            for (int axis = 0; axis < 3; axis++) window = window * out[axis] + steps[axis];
            for (INDEX c = channel; contains && c < channel + per_channel; c++)
                sum += weights[at * channels + c] * dy[window * channels + c];
        }
        dx[i] = sum;
    }
}
"""
"""Gradient of x (N, *extent, C_in); table: see DEPTHWISE"""

_RANGE_SETUP = """
    const INDEX first = groups > 1, channels = table[rank - 1], width = (INDEX)groups * channels;
    const INDEX inner = rank - 2 >= first ? table[rank - 2] : 1;
    INDEX cells = inner;
    for (INDEX axis = first; axis < rank - 2; axis++) cells *= table[axis];
    const INDEX range_cells = (cells + (INDEX)lanes - 1) / (INDEX)lanes;
"""
"""Each thread processes a contiguous range of cells of one channel (of one sample), with few divisions.

Input and output may be the same array, because each cell is read and written by only one thread.
"""


def _kernel_over_ranges(kernel: str, setup: str, arrays: int, body: str, epilogue: str = "") -> str:
    """Return a kernel that runs `body` for each cell, at index at[a] of array a."""
    return f"""
KERNEL void {kernel} {{{_RANGE_SETUP}
    for EACH(i, total) {{
        const INDEX column = i % width, begin = i / width * range_cells;
        const INDEX end = begin + range_cells < cells ? begin + range_cells : cells;
        {setup}
        for (INDEX cell = begin, run = 0; cell < end; cell += run) {{
            const INDEX place = cell % inner;
            INDEX at[{arrays}], step[{arrays}], rest = cell / inner;
            for (int array = 0; array < {arrays}; array++) {{
                const INDEX *strides = table + (array + 1) * rank;
                step[array] = rank > 1 ? strides[rank - 2] : 0;
                at[array] = column % channels * strides[rank - 1] + place * step[array];
                if (groups > 1) at[array] += column / channels * strides[0];
            }}
            for (INDEX axis = rank - 3; axis >= first; axis--) {{
                const INDEX position = rest % table[axis];
                rest /= table[axis];
                for (int array = 0; array < {arrays}; array++) at[array] += position * table[(array + 1) * rank + axis];
            }}
            run = inner - place < end - cell ? inner - place : end - cell;
            for (INDEX k = 0; k < run; k++) {{
                {body}
                for (int array = 0; array < {arrays}; array++) at[array] += step[array];
            }}
        }}
        {epilogue}
    }}
}}
"""


NORMALISE = _kernel_over_ranges(
    """normalise(const T *__restrict__ x, const T *mean, const T *scale, const T *shift, T *__restrict__ y,
                      const INDEX *table, long long rank, long long groups, long long lanes, long long clip,
                      long long total)""",
    "const T centre = mean[column], factor = scale[column], bias = shift[column];",
    2,
    """const T z = (x[at[0]] - centre) * factor + bias;
                y[at[1]] = clip && z <= 0 ? 0 : z;""",
)
"""(x - mean) * scale + shift, for each channel of all samples, or of each sample; table: shape, strides of x and y"""

NORMALISE_BACK = _kernel_over_ranges(
    """normalise_back(const T *__restrict__ x, const T *__restrict__ dy, const T *mean, const T *scale, const T *shift,
                           const T *dz_factor, const T *x_factor, const T *offset, T *__restrict__ dx,
                           const INDEX *table, long long rank,
                           long long groups, long long lanes, long long clip, long long total)""",
    """const T centre = mean[column], factor = scale[column], bias = shift[column];
        const T a = dz_factor[column], b = x_factor[column], c = offset[column];""",
    3,
    """const T from = x[at[0]] - centre, dz = clip && !(from * factor + bias > 0) ? 0 : dy[at[1]];
                dx[at[2]] = dz * a + (from * b + c);""",
)
"""dz_factor * dz + x_factor * (x - mean) + offset, dz being the gradient before clipping; the table: shape, strides of
x, dy and dx"""

CELL_SUMS = _kernel_over_ranges(
    """cell_sums(const T *x, const T *dy, const T *mean, const T *scale, const T *shift, double *sums,
                      const INDEX *table, long long rank, long long groups, long long lanes, long long kind,
                      long long clip, long long total)""",
    """const int g = kind == 2;
        const T centre = g ? mean[column] : 0, factor = g ? scale[column] : 0, bias = g ? shift[column] : 0;
        const INDEX sample = groups > 1 ? column / channels * table[rank] : 0;
        const double origin = x[column % channels * table[2 * rank - 1] + sample];
        double one = 0, two = 0;""",
    2,
    """if (kind == 2) {
                    const T from = x[at[0]] - centre, dz = clip && !(from * factor + bias > 0) ? 0 : dy[at[1]];
                    one += dz;
                    two += (double)dz * from;
                } else if (kind) {
                    const double from = (double)x[at[0]] - origin;
                    one += from;
                    two += from * from;
                } else one += x[at[0]];""",
    """sums[i] = one;
        if (kind) sums[(INDEX)total + i] = two;""",
)
"""Sums of each channel over all samples, or per sample, over each lane's cells: SUMS_KIND of x, MOMENTS_KIND of x -
first and its square (first: the first cell), GRADIENTS_KIND of dz, dz * (x - mean); table: shape, strides of x, dy"""
SUMS_KIND, MOMENTS_KIND, GRADIENTS_KIND = range(3)

FOLD_SUMS = """
KERNEL void fold_sums(const double *sums, double *folded, long long lanes, long long into, long long width,
                      long long total) {
    for EACH(i, total) {
        const INDEX first = i / width / (INDEX)into * (INDEX)lanes, row = i / width % into;
        double sum = 0;
        for (INDEX lane = row; lane < lanes; lane += (INDEX)into) sum += sums[(first + lane) * width + i % width];
        folded[i] = sum;
    }
}
"""
"""Folds sums (..., lanes, width) into fewer lanes"""

LAST_SUMS = """
KERNEL void last_sums(const double *sums, T *result, long long lanes, long long width, long long total) {
    for EACH(i, total) {
        double sum = 0;
        for (INDEX lane = 0; lane < lanes; lane++) sum += sums[(i / width * lanes + lane) * width + i % width];
        result[i] = (T)sum;
    }
}
"""
"""Adds sums (..., lanes, width) over all lanes"""

LAST_MOMENTS = """
KERNEL void last_moments(const double *sums, const T *x, T *result, const INDEX *table, long long rank,
                         long long lanes, long long cells, long long total) {
    for EACH(i, total) {
        const INDEX channels = table[rank - 1], place = i / channels * table[rank] + i % channels * table[2 * rank - 1];
        double first = 0, second = 0;
        for (INDEX lane = 0; lane < lanes; lane++) {
            first += sums[lane * (INDEX)total + i];
            second += sums[((INDEX)lanes + lane) * (INDEX)total + i];
        }
        const double squares = second - first * first / cells;
        result[i] = (T)(x[place] + first / cells);
        result[(INDEX)total + i] = (T)(squares < 0 ? 0 : squares);
    }
}
"""
"""Means, and sums of squared differences from the means, given the sums of MOMENTS_KIND (2, lanes, width)"""

BATCH_NORM_SCALE_SHIFT = """
KERNEL void batch_scale_shift(const T *moments, T *mean, T *var, const T *gamma, const T *beta, T *result,
                              double momentum, double eps, long long total) {
    for EACH(i, total) {
        const T count = moments[0], squares = moments[1 + total + i], unbiased = count - 1 > 1 ? count - 1 : 1;
        const T root = 1 / sqrt(squares / count + (T)eps);
        mean[i] += (T)momentum * (moments[1 + i] - mean[i]);
        var[i] += (T)momentum * (squares / unbiased - var[i]);
        result[i] = moments[1 + i];
        result[total + i] = gamma[i] * root;
        result[2 * total + i] = beta[i];
        result[3 * total + i] = root;
    }
}
"""
"""Mean, scale, shift and 1 / standard deviation (4, C) from moments (1 + 2 C); updates running mean and variance"""

BATCH_NORM_GRADIENT_FACTORS = """
KERNEL void batch_gradient_factors(const T *sums, const T *count, const T *gamma, const T *root, T *result,
                                   long long total) {
    for EACH(i, total) {
        const T dz_factor = gamma[i] * root[i];
        result[i] = dz_factor;
        result[total + i] = -dz_factor * root[i] * (sums[i] / *count);
        result[2 * total + i] = -dz_factor * (sums[total + i] / *count);
    }
}
"""
"""Factors (3, C) of the gradient through the batch statistics, from the gradients of gamma and beta (2, C)"""

ROUND_BFLOAT16 = _kernel_over_ranges(
    """round_bfloat16(const unsigned int *x, unsigned int *y, const INDEX *table, long long rank,
                           long long groups, long long lanes, long long total)""",
    "",
    2,
    """const unsigned int bits = x[at[0]];
                y[at[1]] = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u
                    : (bits + (bits >> 16 & 1) + 0x7fff) & 0xffff0000u;""",
)
"""Bits of float32 elements, rounded to the nearest bfloat16; the table: shape, strides of x and y"""


def specialise_source(source: str, c_type: str, index_type: str = "long long") -> str:
    """Return the source of a kernel for elements and counts of the given types of C."""
    return f"typedef {c_type} T;\ntypedef {index_type} INDEX;\n#define AXES {MAX_ARRAY_AXES}\n{_SOURCE_PREFIX}{source}"
