"""The steps that random modules are made of: each writes an expression of PyTorch, or returns None if none fits.

`step(pen, name, tensor)` is given the name and the value of a tensor. A statement is told by `$`, the name of what it
makes: '$ = x.clone(); $[0] = 1'. Whatever fails is drawn again, so that a step need not look at all conditions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STEPS: dict[str, tuple[float, Callable[[Any, str, Any], str | None]]] = {}


def step(weight: float = 1.0):
    """Return a decorator that adds a step, which is drawn so often."""

    def add(function):
        STEPS[function.__name__] = weight, function
        return function

    return add


def image(function):
    """Make a step one of images (N, C, *spatial), and sometimes of other tensors, such as tokens, taken for some."""

    def checked(pen, x, t):
        n = t.dim() - 2
        return function(pen, x, t, n) if n == pen.spatial or (1 <= n <= 3 and pen.chance(0.4)) else None

    checked.__name__ = function.__name__
    return checked


def each(n, draw):
    return tuple(draw() for _ in range(n))


def divisor(pen, n):
    return pen.one(*[k for k in range(1, n + 1) if n % k == 0])


def dims(pen, t):
    """Return one or several dimensions of a tensor, or one of the usual sets."""
    rank, kind = t.dim(), pen.int(0, 5)
    if kind == 0:
        return pen.int(-rank, rank - 1)
    if kind == 1 and rank > 2:
        return tuple(range(2, rank))
    if kind == 2:
        return tuple(range(rank))
    if kind == 3:
        return pen.int(1, rank - 1) if rank > 1 else 0
    return tuple(sorted(pen.rng.sample(range(rank), pen.int(1, rank))))


# Windows.


@step(5)
@image
def conv(pen, x, t, n):
    groups = divisor(pen, t.shape[1]) if pen.chance(0.3) else 1
    out = groups * pen.int(1, 4)
    same = pen.chance(0.15)
    stride = 1 if same or pen.chance() else each(n, lambda: pen.int(1, 3))
    mode = pen.one("zeros", "zeros", "zeros", "reflect", "replicate", "circular")
    padding = repr("same") if same else each(n, lambda: pen.int(0, 3))
    kernel = each(n, lambda: pen.int(1, 4)) if pen.chance() else 3
    layer = pen.made(
        f"nn.Conv{n}d({t.shape[1]}, {out}, {kernel}, {stride}, {padding}, {each(n, lambda: pen.int(1, 2))}, {groups},"
        f" {pen.chance()}, {mode!r})"
    )
    return f"{layer}({x})"


@step(1)
@image
def conv_function(pen, x, t, n):
    weight = pen.parameter((t.shape[1], 1, *each(n, lambda: pen.int(1, 4))))
    pads = [pen.int(0, 3) for _ in range(2 * n)]
    return f"F.conv{n}d(F.pad({x}, {pads}), {weight}, stride={pen.int(1, 2)}, groups={t.shape[1]})"


@step(2)
@image
def conv_transpose(pen, x, t, n):
    groups = divisor(pen, t.shape[1]) if pen.chance(0.3) else 1
    stride, dilation = each(n, lambda: pen.int(1, 3)), each(n, lambda: pen.int(1, 2))
    extra = tuple(pen.int(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    padding = each(n, lambda: pen.int(0, 2))
    layer = pen.made(
        f"nn.ConvTranspose{n}d({t.shape[1]}, {groups * pen.int(1, 3)}, {each(n, lambda: pen.int(1, 4))}, {stride},"
        f" {padding}, {extra}, {groups}, {pen.chance()}, {dilation})"
    )
    return f"{layer}({x})"


@step(2)
@image
def max_pool(pen, x, t, n):
    kernel = each(n, lambda: pen.int(1, 4))
    padding = tuple(pen.int(0, k // 2) for k in kernel)
    stride = None if pen.chance(0.3) else each(n, lambda: pen.int(1, 3))
    dilation = 1 if pen.chance(0.7) else each(n, lambda: pen.int(1, 2))
    return f"F.max_pool{n}d({x}, {kernel}, {stride}, {padding}, {dilation}, {pen.chance()})"


@step(2)
@image
def avg_pool(pen, x, t, n):
    kernel = each(n, lambda: pen.int(1, 4))
    padding = tuple(pen.int(0, k // 2) for k in kernel)
    stride = None if pen.chance(0.3) else each(n, lambda: pen.int(1, 3))
    more = f", {pen.int(1, 5)}" if n > 1 and pen.chance(0.2) else ""
    return f"F.avg_pool{n}d({x}, {kernel}, {stride}, {padding}, {pen.chance()}, {pen.chance()}{more})"


@step(0.7)
@image
def max_pool_indices(pen, x, t, n):
    kernel, stride, padding = pen.int(1, 3), pen.int(1, 3), pen.int(0, 1)
    pool = f"F.max_pool{n}d({x}, {kernel}, {stride}, {min(padding, kernel // 2)}, return_indices=True)"
    size = f"output_size={list(t.shape[2:])}"
    return pen.one(
        f"y, i = {pool}; $ = y * (i % 5)",
        f"y, i = {pool}; $ = F.max_unpool{n}d(y, i, {kernel}, {stride}, {padding}, {size})",
        f"y, i = {pool}; $ = F.max_unpool{n}d(y, i, {kernel}, {stride}, {padding}, {size})" if n == 2 else None,
    )


@step(0.5)
@image
def lp_pool(pen, x, t, n):
    return f"F.lp_pool{n}d({x}.abs() + 0.1, {pen.int(1, 3)}, {pen.int(1, 3)}, {pen.int(1, 3)}, {pen.chance()})"


@step(2)
@image
def adaptive_pool(pen, x, t, n):
    size = pen.one(1, pen.int(1, 6), each(n, lambda: pen.one(None, pen.int(1, 9))))
    return f"F.adaptive_{pen.one('avg', 'avg', 'max')}_pool{n}d({x}, {size})"


@step(0.5)
@image
def unfold_image(pen, x, t, n):
    if n != 2:
        return None
    how = f"{pen.int(1, 3)}, {pen.int(1, 2)}, {pen.int(0, 1)}, {pen.int(1, 2)}"
    columns = f"F.unfold({x}, {how})"
    return columns if pen.chance() else f"F.fold({columns}, {tuple(t.shape[2:])}, {how})"


@step(0.7)
def unfold_tensor(pen, x, t):
    if not t.dim():
        return None
    return f"{x}.unfold({pen.int(0, t.dim() - 1)}, {pen.int(1, 4)}, {pen.int(1, 3)})"


# Resampling and padding.


@step(2.5)
@image
def pad(pen, x, t, n):
    mode = pen.one("constant", "constant", "reflect", "replicate", "circular")
    low = -2 if pen.chance(0.4) else 0
    axes = pen.int(1, n + (mode == "constant")) if mode == "constant" else n
    amounts = [pen.int(low, 4) for _ in range(2 * axes)]
    value = f", value={pen.one(0.0, 1.5)}" if mode == "constant" else ""
    return f"F.pad({x}, {amounts}, mode={mode!r}{value})"


@step(3)
@image
def interpolate(pen, x, t, n):
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[n]
    mode = pen.one("nearest", "nearest-exact", "area", *smooth, *smooth)
    how = f", mode={mode!r}"
    if mode in smooth:
        how += f", align_corners={pen.chance()}" + (f", antialias={pen.chance(0.3)}" if n == 2 else "")
    if pen.chance():
        return f"F.interpolate({x}, size={each(n, lambda: pen.int(1, 14 if n < 3 else 6))}{how})"
    factor = pen.one(2, 2.0, 3, 0.5, 1.7, 2.3, 0.6, each(n, lambda: pen.one(1.0, 1.5, 2.0, 0.7)))
    factors = factor if isinstance(factor, tuple) else (factor,) * n
    odd = [m for m, f in zip(t.shape[2:], factors, strict=True) if f not in (1, 2) and int(m * f) in (m, 2 * m)]
    if mode.startswith("nearest") and odd:  # here PyTorch's own gradient is that of another factor
        return None
    more = f", recompute_scale_factor={pen.one(True, None)}"
    return f"F.interpolate({x}, scale_factor={factor}{how}{more})"


@step(1)
@image
def pixels(pen, x, t, n):
    r = pen.int(2, 3)
    return f"F.{pen.one('pixel_shuffle', 'pixel_unshuffle')}({x}, {r})" if n == 2 else None


@step(0.5)
@image
def channel_shuffle(pen, x, t, n):
    return f"F.channel_shuffle({x}, {divisor(pen, t.shape[1])})"


# Cells moved.


@step(3)
def slices(pen, x, t):
    index = []
    for _ in range(t.dim()):
        start, end, stride = pen.one(None, None, 0, 1, 2, -3), pen.one(None, None, None, -1, -2, 5), pen.one(1, 1, 2, 3)
        index.append(
            ":" if pen.chance(0.4) else f"{'' if start is None else start}:{'' if end is None else end}:{stride}"
        )
    return f"{x}[{', '.join(index)}]" if index else None


@step(0.7)
def one_index(pen, x, t):
    if not t.dim():
        return None
    return f"{x}.select({pen.int(0, t.dim() - 1)}, {pen.one(0, -1)})"


@step(1)
def flip(pen, x, t):
    return f"{x}.flip({[d for d in range(t.dim()) if pen.chance()]})"


@step(1.2)
def roll(pen, x, t):
    if not t.dim():
        return None
    chosen = pen.rng.sample(range(-t.dim(), 0), pen.int(1, t.dim()))
    return f"{x}.roll({tuple(pen.int(-17, 17) for _ in chosen)}, {tuple(chosen)})"


@step(2)
def cat(pen, x, t):
    if not t.dim():
        return None
    d = pen.int(-t.dim(), t.dim() - 1)
    return f"torch.{pen.one('cat', 'cat', 'cat', 'stack')}([{x}, {pen.like(t) or x + '.sin()'}], {d})"


@step(1)
def parts(pen, x, t):
    if not t.dim():
        return None
    d = pen.int(-t.dim(), t.dim() - 1)
    n, at = t.shape[d], pen.int(0, 1)
    cut = pen.int(1, max(1, n - 1))
    return pen.one(
        f"{x}.split({pen.int(1, 4)}, {d})[{at}]",
        f"{x}.split([{cut}, {n - cut}], {d})[{at}]",
        f"{x}.chunk({pen.int(1, 4)}, {d})[{at}]",
        f"{x}.narrow({d}, {n // 3}, {max(1, n // 2)})",
        f"{x}.unbind({d})[{at}]",
        f"torch.cat({x}.chunk(2, {d})[::-1], {d})",
        f"torch.tensor_split({x}, 2, {d})[{at}]",
    )


@step(1)
def picked(pen, x, t):
    if not t.dim():
        return None
    d = pen.int(0, t.dim() - 1)
    index = [pen.int(0, t.shape[d] - 1) for _ in range(pen.int(1, 5))]
    return pen.one(
        f"{x}.index_select({d}, torch.tensor({index}))",
        f"{x}[{':, ' * d}torch.tensor({index})]",
        f"{x}.repeat_interleave({pen.int(1, 3)}, {d})",
        f"{x}[{':, ' * d}{index}]",
    )


@step(2)
def picked_by_values(pen, x, t):
    if not t.dim():
        return None
    d = pen.int(-t.dim(), t.dim() - 1)
    n, dots = t.shape[d], ":, " * (d % t.dim())
    index = [pen.int(0, n - 1) for _ in range(pen.int(1, n))]
    tensor, first = f"torch.tensor({index})", f"{x}.narrow({d}, 0, {len(index)})"
    order, y = f"{x}.argsort({d})", pen.like(t) or f"{x}.cos()"
    fewer = "".join(f".narrow({e}, 0, {pen.int(1, m)})" for e, m in enumerate(t.shape) if pen.chance(0.2))
    both = [f"torch.tensor({each(3, lambda m=m: pen.int(0, m - 1))})" if pen.chance() else ":" for m in t.shape]
    unique = f"torch.tensor({sorted(set(index))})"
    return pen.one(
        f"{x}.gather({d}, {order}{fewer})", f"{x}.gather({d}, {order}.narrow({d}, 0, 1))",
        f"{x}.take_along_dim({x}.mean({d}, keepdim=True).argsort(0), {d})", f"{x}.take({order} + {x}.shape[0])",
        f"{x}.scatter({d}, {order}, {y})", f"{x}.scatter({d}, {x}.argmax({d}, keepdim=True), 0.5)",
        f"torch.zeros_like({x}).scatter_add({d}, {order} // 2, {y})",
        f"{x}.scatter_reduce({d}, {order}, {y}, {pen.one('sum', 'mean', 'amax')!r}, include_self={pen.chance()})",
        f"{x}.index_add({d}, {tensor}, {first}.sin())", f"{x}.index_copy({d}, {unique}, {y}[{dots}{unique}])",
        f"{x}.index_fill({d}, {tensor}, {pen.one('1.5', x + '.mean()')})",
        f"$ = {x} * 1; $[{dots}{tensor}] = {pen.one('0.5', x + '.mean()', f'{y}[{dots}{index[:1]}]')}",
        f"$ = {x} * 1; $[{dots}{unique}] = {y}[{dots}{unique}]", f"$ = {x} * 1; $[$ > 0.3] = {y}.mean()",
        f"$ = {x} * 1; $[{dots}torch.arange({n}) % 2 == 0] = 0.3", f"{x}[{', '.join(both)}]",
        f"$ = {x} * 1; $[{', '.join(both)}] = {x}.mean()",
        f"torch.bucketize({x}, torch.linspace(-1, 1, 5).double()) * {x}",
        f"torch.searchsorted({x}.sort(-1)[0], {y}.contiguous()) * {x}",
    )  # fmt: skip


# Dimensions regrouped.


@step(1.5)
def permuted(pen, x, t):
    n = t.dim()
    if n < 2:
        return None
    order = pen.rng.sample(range(n), n)
    a, b = order[:2]
    return pen.one(
        f"{x}.permute({order})",
        f"{x}.transpose({a}, {b - n})",
        f"{x}.movedim({a}, {b})",
        f"{x}.mT",
        f"{x}.swapaxes({a}, {b})",
    )


@step(1)
def laid_out(pen, x, t):
    """The same in another order of memory."""
    last = {4: "channels_last", 5: "channels_last_3d"}.get(t.dim())
    return pen.one(f"{x}.contiguous()", f"{x}.contiguous(memory_format=torch.{last})" if last else None)


@step(2)
def reshaped(pen, x, t):
    n, shape = t.dim(), list(t.shape)
    if not n:
        return None
    a = pen.int(0, n - 1)
    b = pen.int(a, n - 1)
    k = divisor(pen, shape[a])
    split = [*shape[:a], k, shape[a] // k, *shape[a + 1 :]]
    joined = [*shape[:a], -1, *shape[b + 1 :]]
    return pen.one(
        f"{x}.flatten({a}, {b})",
        f"{x}.unflatten({a}, ({k}, {shape[a] // k}))",
        f"{x}.reshape({split})",
        f"{x}.reshape({joined})",
        f"{x}.unsqueeze({a})",
        f"{x}.squeeze()",
        f"{x}.contiguous().view({joined})",
        f"{x}.view({pen.one(joined, split)})",
        f"{x}.reshape({[*shape[::-1]]})",
    )


@step(1)
def repeated(pen, x, t):
    n = t.dim()
    if not n:
        return None
    return pen.one(
        f"{x}.repeat({[pen.one(1, 1, 1, 2) for _ in range(n)]})",
        f"{x}.expand({pen.int(1, 2)}, {', '.join(['-1'] * n)})",
        f"{x}[:, :1].expand({', '.join(['-1'] * n)})",
        f"{x}[:, :1].expand_as({x})",
        f"torch.tile({x}, ({', '.join(str(pen.one(1, 2)) for _ in range(2))}))",
    )


@step(2)
@image
def tokens(pen, x, t, n):
    return f"{x}.flatten(2){pen.one('', '.transpose(1, 2)')}"


@step(2)
def shaped_as(pen, x, t):
    """Tokens back to an image, for one."""
    shapes = [other.shape for other in pen.tensors.values() if other.numel() == t.numel() and other.shape != t.shape]
    return f"{x}.reshape({list(pen.one(*shapes))})" if shapes else None


# A few numbers of many.


@step(3)
def reduced(pen, x, t):
    if not t.dim():
        return None
    d, keep = dims(pen, t), pen.chance()
    name = pen.one("mean", "mean", "sum", "var", "std", "amax", "amin", "logsumexp", "norm")
    if name == "norm":
        return f"({x} + 0.01).norm(dim={d}, keepdim={keep})"
    more = f", correction={pen.int(0, 1)}" if name in ("var", "std") else ""
    return f"{x}.{name}({d}{more}, keepdim={keep})"


@step(1)
def of_all(pen, x, t):
    return pen.one(f"{x} * {x}.mean()", f"{x} - {x}.max()", f"{x}.sum()", f"{x} / (1 + {x}.var())", f"{x} + {x}.min()")


@step(2)
def along_one(pen, x, t):
    if not t.dim():
        return None
    d = pen.int(-t.dim(), t.dim() - 1)
    return pen.one(
        f"{x}.softmax({d})", f"{x}.log_softmax({d})", f"{x}.cumsum({d})", f"{x}.max({d})[0]",
        f"{x}.min({d}, keepdim=True)[0]",
        f"{x} * ({x}.argmax({d}, keepdim=True) + 1)", f"F.normalize({x}, dim={d})", f"F.glu({x}, {d})",
        f"{x} * {x}.argmax({d}).double().mean()", f"{x}.sort({d})[0]", f"{x}.topk(1, {d})[0]", f"{x}.prod({d})",
        f"F.cosine_similarity({x}, {x}.flip({d}), {d})", f"{x} - {x}.mean({d}, keepdim=True)",
    )  # fmt: skip


@step(1.5)
def counted(pen, x, t):
    """Whole numbers, and truth."""
    if not t.dim():
        return None
    d, keep = pen.int(-t.dim(), t.dim() - 1), pen.chance()
    return pen.one(
        f"({x} > 0).any({d}, keepdim={keep}).double()", f"({x} > -1).all({d}).double()", f"({x} > 0).sum({d}).double()",
        f"(({x} > 0) & ({x} < 1)).roll(2, {d}) * {x}", f"({x} * 4).long().sum({d}, keepdim=True) + {x}",
        f"({x} * 4).long().flip({d}) % 3 * {x}", f"({x} * 4).long().amax({d}, keepdim={keep}).double()",
        f"F.one_hot({x}.argmax({d}), 40).double()",
        f"F.embedding({x}.argmax({d}), {pen.parameter((40, 3))}, padding_idx={pen.one(None, 0)})",
        f"torch.where({x} > 1, torch.nan, {x}).nansum({d}, keepdim={keep})", f"{x} - {x}.median()",
        f"{x}.quantile(0.4, {d}, keepdim={keep})", f"torch.where({x} > 1, torch.nan, {x}).nanmedian({d})[0]",
        f"({x} > 0).double().mean({d}, keepdim=True) * {x}", f"F.pad(({x} > 0).long(), (1, 2)).double()",
        f"torch.where(({x} * 2).int().cumsum({d}) > 1, {x}, 0.0)", f"torch.logical_not({x} > 0).to({x}.dtype) * {x}",
        f"torch.var_mean({x}, {d}, keepdim={keep})[{pen.int(0, 1)}]", f"torch.aminmax({x}, dim={d})[0]",
        f"{x}.count_nonzero({d}).double()", f"({x} * 2).round() * {x}",
        f"torch.cat([({x} > 0), ({x} < 1)], {d}).double()",
    )  # fmt: skip


@step(0.7)
def costs(pen, x, t):
    if t.dim() < 2:
        return None
    reduction = f"reduction={pen.one('mean', 'sum', 'none')!r}"
    target = f"{x}.argmax(1)"
    return pen.one(
        f"F.cross_entropy({x}, {target}, {reduction})", f"F.nll_loss({x}.log_softmax(1), {target}, {reduction})",
        f"F.cross_entropy({x}, {x}.softmax(1).detach(), {reduction}, label_smoothing={pen.one(0.0, 0.1)})",
        f"F.cross_entropy({x}, {target}, {reduction}, ignore_index=1, label_smoothing={pen.one(0.0, 0.1)})",
        f"F.cross_entropy({x}, {target}, torch.linspace(1, 2, {t.shape[1]}).double(), {reduction})",
        f"F.binary_cross_entropy_with_logits({x}, ({x} > 0.1).double(), {reduction})",
        f"F.smooth_l1_loss({x}, {x}.flip(0).detach(), {reduction})", f"F.huber_loss({x}, {x}.square(), {reduction})",
        f"F.kl_div({x}.log_softmax(1), {x}.softmax(1).detach(), {reduction})", f"F.mse_loss({x}, {x} * 0, {reduction})",
    )  # fmt: skip


@step(1)
def linear_algebra(pen, x, t):
    if t.dim() < 2:
        return None
    n, d, e = t.shape[-1], *pen.rng.sample(range(-t.dim(), 0), 2)
    gram = f"({x}.mT @ {x} / {t.shape[-2]} + 2 * torch.eye({n}).double())"
    return pen.one(
        f"torch.linalg.inv({gram})", f"torch.linalg.cholesky({gram})", f"torch.linalg.slogdet({gram})[1]",
        f"torch.linalg.solve({gram}, {x}.mT)", f"torch.linalg.eigvalsh({gram})", f"torch.matrix_exp({gram} / {n})",
        f"torch.linalg.solve_triangular({gram}, {x}.mT, upper={pen.chance()})", f"torch.linalg.svdvals({gram})",
        f"torch.linalg.matrix_power({gram}, {pen.int(-1, 2)})", f"torch.linalg.qr({gram})[1]", f"{gram}.logdet()",
        f"{x}.diagonal({pen.int(-1, 2)}, {d}, {e})", f"torch.diag_embed({x}, {pen.int(-1, 1)}, {d}, {e})",
        f"$ = {x} * 1; $.diagonal(0, {d}, {e}).mul_(2)", f"{x}.tril({pen.int(-1, 1)})", f"{x}.triu({pen.int(-1, 1)})",
    )  # fmt: skip


# Spectra and complex numbers, whose results are real again.


@step(1.5)
def spectra(pen, x, t):
    if not t.dim():
        return None
    d = tuple(sorted(pen.rng.sample(range(-t.dim(), 0), pen.int(1, min(t.dim(), 3)))))
    keep = pen.one("", ", norm='ortho'")
    sizes = [t.shape[i] for i in d]
    longer = [n + pen.int(-2, 3) for n in sizes]
    seen = f"torch.fft.rfftn({x}, dim={d}{keep})"
    shape = [*t.shape]
    shape[d[-1]] = t.shape[d[-1]] // 2 + 1
    weight = pen.made(f"nn.Parameter(torch.randn({[n if pen.chance(0.7) else 1 for n in shape]}, dtype=torch.cdouble))")
    return pen.one(
        f"torch.fft.irfftn({seen} * {weight}, s={sizes}, dim={d}{keep})",
        f"torch.fft.irfftn({seen} * {weight}, s={longer}, dim={d}{keep})",
        f"torch.fft.fftn({x}, s={longer}, dim={d}).abs()",
        f"torch.view_as_real(torch.fft.ifft({x}, dim={d[0]}))",
        f"torch.fft.fft({x}, dim={d[0]}).{pen.one('real', 'imag', 'conj().imag')}",
        f"torch.fft.hfft({x}, dim={d[0]})",
        f"torch.fft.fftshift(torch.fft.fftn({x}, dim={d}), dim={d}).real",
        f"torch.fft.ifftn(torch.fft.fftn({x}, dim={d}).flip({d[0]}), dim={d}).real",
    )


@step(1)
def complex_numbers(pen, x, t):
    if not t.dim():
        return None
    weight = pen.made(f"nn.Parameter(torch.randn({[n if pen.chance() else 1 for n in t.shape]}, dtype=torch.cdouble))")
    matrix = pen.made(f"nn.Parameter(torch.randn({t.shape[-1]}, 2, dtype=torch.cdouble))")
    z = f"torch.complex({x}, {pen.like(t) or x + '.sin()'})"
    return pen.one(
        f"({z} * {weight}).real", f"({z} * {weight}.conj()).imag.sin()", f"({z} @ {matrix}).abs()",
        f"(torch.polar({x}.abs() + 0.1, {x}) + {weight}).angle().cos()", f"torch.view_as_real({z} / ({weight} + 3))",
        f"({z} - {z}.mean(-1, keepdim=True)).abs().square()", f"({z} * {weight}).sum(0).imag",
        f"torch.cat([{z}, {z}.conj() * {weight}], -1).real", f"{x} * {weight}.abs().sum()",
        f"torch.view_as_complex(torch.stack([{x}, {x}.cos()], -1)).exp().real",
        f"{z}.var(-1, keepdim=True) * {x}", f"torch.where({x} > 0, {z}, {weight}).imag",
    )  # fmt: skip


# Normalisation.


@step(3)
@image
def normalised(pen, x, t, n):
    c, cells = t.shape[1], list(t.shape[2:])
    affine = pen.chance(0.7)
    return (
        pen.made(
            pen.one(
                f"nn.BatchNorm{n}d({c}, affine={affine}, track_running_stats={pen.chance(0.8)},"
                f" momentum={pen.one(0.1, 0.3)})",
                f"nn.BatchNorm{n}d({c})",
                f"nn.InstanceNorm{n}d({c}, affine={affine}, track_running_stats={pen.chance(0.3)})",
                f"nn.GroupNorm({divisor(pen, c)}, {c}, affine={affine})",
                f"nn.LayerNorm({[c, *cells]}, elementwise_affine={affine})",
                f"nn.LayerNorm({cells}, elementwise_affine={affine})",
                f"nn.LayerNorm({cells[-1:]}, bias={pen.chance()})",
                f"nn.RMSNorm({pen.one([c, *cells], cells[-1:])})",
                "nn.LocalResponseNorm(2)",
            )
        )
        + f"({x})"
    )


@step(1)
def layer_norm(pen, x, t):
    return f"F.layer_norm({x}, {list(t.shape[pen.int(1, t.dim() - 1) :])})" if t.dim() > 1 else None


@step(1)
@image
def computed_weights(pen, x, t, n):
    """Weights that are cells, which lie on several ranks."""
    c, last, ones = t.shape[1], t.shape[-1], ", 1" * n
    few = f"{x}.flatten()[:{c}]"
    return pen.one(
        f"F.conv{n}d({x}, {few}.reshape({c}, 1{ones}), {few}, groups={c})",
        f"F.conv_transpose{n}d({x}, {few}.reshape({c}, 1{ones}), {few}, groups={c})",
        f"F.batch_norm({x}, None, None, {few}, {few}, True)", f"F.instance_norm({x}, weight={few}, bias={few})",
        f"F.group_norm({x}, {divisor(pen, c)}, {few}, {few})", f"F.prelu({x}, {few})",
        f"F.layer_norm({x}, {[last]}, {x}.flatten()[:{last}], {x}.flatten()[-{last}:])",
        f"F.linear({x}, {x}.flatten()[:{2 * last}].reshape(2, -1), {x}.flatten()[:2])",
        f"F.cross_entropy({x}, {x}.argmax(1), {few}.abs() + 1)",
    )  # fmt: skip


# Products and attention.


@step(1)
@image
def channel_linear(pen, x, t, n):
    layer = pen.made(f"nn.Linear({t.shape[1]}, {pen.int(1, 5)}, bias={pen.chance()})")
    return f"{layer}({x}.movedim(1, -1)).movedim(-1, 1)"


@step(1)
def last_linear(pen, x, t):
    if not t.dim():
        return None
    layer = pen.made(f"nn.Linear({t.shape[-1]}, {pen.int(1, 5)}, bias={pen.chance()})")
    return f"{layer}({x})"


@step(1)
def flat_linear(pen, x, t):
    if t.dim() < 2:
        return None
    layer = pen.made(f"nn.Linear({t[0].numel()}, {pen.int(1, 5)})")
    return f"{layer}({x}.flatten(1))"


@step(1.5)
def products(pen, x, t):
    if t.dim() < 2:
        return None
    weight = pen.parameter((t.shape[-1], pen.int(1, 4)))
    flat = f"{x}.flatten(2)" if t.dim() > 2 else x
    letters = "ncdefgh"[: t.dim()]
    return pen.one(
        f"{x} @ {weight}", f"{x} @ {x}.transpose(-1, -2)", f"{x}.mT @ {x}", f"{flat} @ {flat}.mT / 5",
        f"{flat}.mT @ {flat} / 5",
        f"({flat}.mT @ {flat} / 5).softmax(-1) @ {flat}.mT",
        f"torch.einsum('{letters},{letters}->{letters[:2]}', {x}, {x})",
        f"torch.einsum('{letters},{letters[1]}k->{letters.replace('c', 'k')}', {x}, {pen.parameter((t.shape[1], 3))})",
        f"torch.bmm({flat}, {flat}.transpose(1, 2)) / 9",
        f"{x} @ {pen.parameter((t.shape[-1],))}", f"torch.outer({x}.flatten()[:5], {x}.mean((0,)).flatten()[:4])",
        f"F.bilinear({x}, {x}, {pen.parameter((2, t.shape[-1], t.shape[-1]))})",
    )  # fmt: skip


@step(2)
@image
def attention(pen, x, t, n):
    c = t.shape[1]
    heads = divisor(pen, c)
    tokens = f"{x}.flatten(2).transpose(1, 2)"
    back = f".transpose(1, 2).reshape({list(t.shape)})"
    several = f"{x}.flatten(2).unflatten(1, ({heads}, {c // heads})).transpose(2, 3)"
    qkv = f"{pen.made(f'nn.Linear({c}, {3 * c})')}({tokens})"
    qkv += f".reshape({t.shape[0]}, -1, 3, {heads}, {c // heads}).permute(2, 0, 3, 1, 4)"
    many = pen.made(f"nn.MultiheadAttention({c}, {heads}, batch_first=True)")
    layer = pen.made(
        f"nn.TransformerEncoderLayer({c}, {heads}, 5, dropout=0.0, batch_first=True, norm_first={pen.chance()})"
    )
    return pen.one(
        f"F.scaled_dot_product_attention({tokens}, {tokens}, {tokens}){back}",
        f"F.scaled_dot_product_attention({several}, {several}, {several}).transpose(2, 3).reshape({list(t.shape)})",
        f"F.scaled_dot_product_attention(*{qkv}.unbind(0)).transpose(1, 2).flatten(2){back}",
        f"{many}(*[{tokens}] * 3){pen.one('[0]' + back, '[1]', '[0]')}",
        f"{layer}({tokens}){pen.one(back, '')}",
        f"F.scaled_dot_product_attention({tokens}, {tokens}, {tokens}, is_causal=True){back}",
        f"({tokens} + {pen.parameter((1, t[0, 0].numel(), c))}){back}",
        f"torch.cat([{pen.parameter((1, 1, c))}.expand({t.shape[0]}, -1, -1), {tokens}], 1)",
    )


@step(1.5)
@image
def windowed(pen, x, t, n):
    """Attention in windows, as views."""
    if n != 2:
        return None
    b, c, h, w = t.shape
    i, j = divisor(pen, h), divisor(pen, w)
    windows = f"{x}.reshape({b}, {c}, {h // i}, {i}, {w // j}, {j}).permute(0, 2, 4, 3, 5, 1).reshape(-1, {i * j}, {c})"
    mix = pen.one(f"F.scaled_dot_product_attention(*[{windows}] * 3)", f"{windows}.softmax(1)", f"{windows}.cumsum(1)")
    return (
        f"{mix}.reshape({b}, {h // i}, {w // j}, {i}, {j}, {c}).permute(0, 5, 1, 3, 2, 4).reshape({b}, {c}, {h}, {w})"
    )


# Gradients of one's own.


@step(0.7)
def function(pen, x, t):
    """An autograd.Function, of one index each or not."""
    forward, backward = pen.one(
        ("a.sign()", "g * 2"), ("a * 2", "(-g).clamp(-1, 1)"), ("a.round().clamp(-1, 1)", "g * (a.abs() < 1)"),
        ("a - a.mean()", "g"), ("a * 1", "g / a.numel()"), ("a.flip(-1)", "g"), ("a + len(a)", "g + 1"),
    )  # fmt: skip
    save, saved = ("c.save_for_backward(a), ", "(lambda a: $)(*c.saved_tensors)")
    made = {"forward": f"lambda c, a: ({save}{forward})[1]", "backward": f"lambda c, g: {saved.replace('$', backward)}"}
    body = ", ".join(f"'{name}': staticmethod({text})" for name, text in made.items())
    cells = f"{x} * 1.0" if pen.chance(0.7) or t.dim() < 2 else f"{x}.mean(-1)"
    return f"$ = type('Own', (torch.autograd.Function,), {{{body}}}).apply({cells})"


# One index each, and broadcasting.


@step(0.7)
def stopped(pen, x, t):
    return pen.one(
        f"{x} * {x}.detach()",
        f"with torch.no_grad(): $ = {x} * {x}.mean()",
        f"{x} * {x}.detach().sum(-1, keepdim=True)" if t.dim() else None,
    )


@step(4)
def pointwise(pen, x, t):
    return pen.one(
        f"F.relu({x})", f"F.gelu({x})", f"{x}.sigmoid()", f"F.silu({x})", f"F.leaky_relu({x}, 0.2)", f"F.elu({x})",
        f"F.hardswish({x})", f"{x}.tanh().exp()", f"{x}.clamp(-1, 0.7)", f"1 - {x} * 2", f"{x} / 3 + 1",
        f"{x}.clamp(min=0.1)",
        f"{x}.masked_fill({x} > 0.5, 0.1)", f"torch.where({x} > 0, {x}, 0.1 * {x})", f"({x} > 0).to({x}.dtype) * {x}",
        f"{x}.masked_fill({x}.sum(-1, keepdim=True) > 0.5, 0.1)" if t.dim() else None, f"{x}.abs().sqrt()",
        f"F.dropout({x}, 0.0, True)", f"{x} * ({x} * 3).long()", f"torch.zeros_like({x}) + {x}.square()",
        f"{pen.made('nn.PReLU()')}({x})", f"torch.full_like({x}, 2.0) * {x}", f"F.softplus({x})",
        f"{x}.double().type_as({x})",
        f"{x}.new_zeros({list(t.shape)}) + {x}", f"{x}.new_ones(1) * {x}", f"torch.lerp({x}, {x}.sin(), 0.3)",
    )  # fmt: skip


@step(3)
def combined(pen, x, t):
    y = pen.like(t)
    if y is None:
        return None
    return pen.one(
        f"{x} + {y}", f"{x} * {y}", f"torch.maximum({x}, {y})", f"torch.where({x} > {y}, {x}, 0.5)", f"{x} - 0.5 * {y}",
        f"torch.add({x}, {y}, alpha=2)", f"torch.addcmul({x}, {y}, {y}, value=0.5)", f"F.mse_loss({x}, {y})",
        f"({x} > {y}) * {x}", f"{x}.clamp(max={y})", f"F.l1_loss({x}, {y}, reduction='none')",
    )  # fmt: skip


@step(3)
def broadcast(pen, x, t):
    kind = pen.int(0, 4)
    if kind == 0:
        shape = tuple(t.shape[pen.int(0, t.dim()) :])
    elif kind == 1 and t.dim() > 1:
        shape = (1, *t.shape[1:])
    elif kind == 2 and t.dim() > 2:
        shape = (t.shape[1], *[1] * (t.dim() - 2))
    else:
        shape = tuple(n if pen.chance() else 1 for n in t.shape)
    weight = pen.parameter(shape)
    return pen.one(
        f"{x} + {weight}", f"{x} * {weight}", f"{weight} - {x}", f"torch.where({x} > {weight}, {x}, {weight})",
        f"{weight}.expand_as({x}) * {x}", f"{x} * {weight} + {weight}.sum()",
        f"{x} + {weight}.relu().sum(0)" if shape else None,
        f"torch.cat([{x}, {weight}.expand_as({x})], 0)" if shape else None,
    )  # fmt: skip


@step(1.5)
def small_broadcast(pen, x, t):
    """With a smaller tensor of the same module."""
    names = [name for name, other in pen.tensors.items() if other.dim() < t.dim() or other.numel() < t.numel()]
    return f"{x} {pen.one('+', '*')} {pen.one(*names)}" if names else None


@step(1.5)
@image
def gates(pen, x, t, n):
    cells, c = tuple(range(2, n + 2)), t.shape[1]
    a, b = pen.made(f"nn.Linear({c}, 2)"), pen.made(f"nn.Linear(2, {c})")
    spatial = pen.made(f"nn.Conv{n}d(2, 1, 3, padding=1)")
    channel = pen.made(f"nn.Conv{n}d({c}, {c}, 1)")
    return pen.one(
        f"{x} * {b}({a}({x}.mean({cells})).relu()).sigmoid()[(...,) + (None,) * {n}]",
        f"{x} * {spatial}(torch.cat([{x}.mean(1, keepdim=True), {x}.amax(1, keepdim=True)], 1)).sigmoid()",
        f"{x} * {channel}(F.adaptive_avg_pool{n}d({x}, 1)).sigmoid()",
        f"{x} + {channel}({x}).relu()",
        f"{channel}({channel}({x}))",
    )


@step(1.5)
@image
def coordinates(pen, x, t, n):
    batch, _, *cells = t.shape
    axes = ", ".join(f"torch.{pen.one(f'arange({m})', f'linspace(-1, 1, {m})', f'ones({m})')}" for m in cells)
    grid = f"torch.stack([g.double() for g in torch.meshgrid({axes}, indexing='ij')])"
    return pen.one(
        f"torch.cat([{x}, {grid}[None].expand({batch}, {', '.join(['-1'] * (n + 1))})], 1)",
        f"{x} + {grid}.sum(0)",
        f"{x} * torch.linspace(0, 1, {cells[-1]})",
        f"{x} * (torch.arange({cells[0]}) % 2)[(...,) + (None,) * {n - 1}]",
        f"F.grid_sample({x}, torch.zeros({batch}, 3, 3, 2).double(), align_corners=False)"
        if n == 2 and pen.chance(0.1)
        else None,
        f"torch.cat([{x}, torch.zeros({batch}, 1, {', '.join(map(str, cells))})], 1)",
    )


@step(2)
def in_place(pen, x, t):
    d = t.dim()
    if not d:
        return None
    index = [pen.one(":", ":", "1:", ":-1", "::2", "1::2", ":2", "-1:") for _ in range(d)]
    at = f"[{', '.join(index)}]"
    return pen.one(
        f"$ = {x}.clone(); ${at} += 1", f"$ = {x} * 1.0; ${at} = 0.5", f"$ = {x} * 2; $.add_(1).relu_()",
        f"$ = {x} + 0; ${at} *= {x}{at}", f"$ = {x} * 1; $[0] = 1.5", f"$ = {x} * 1; ${at} = {x}{at}.flip(-1)",
        f"$ = torch.zeros_like({x}); ${at} = {x}{at}", f"$ = F.relu({x} * 2, inplace=True); $.mul_({x})",
        f"$ = {x} * 1; $.clamp_(-1, 1); $[..., 0] += 2",
    )  # fmt: skip
