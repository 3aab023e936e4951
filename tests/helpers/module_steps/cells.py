"""Steps that look at cells around, move cells or regroup dimensions."""

from .registry import divisor, each, image, step

# Windows.


def dilations(pen, n):
    """Often none; some are wider than a tile."""
    return each(n, lambda: pen.one(1, 1, 1, 1, 2, 2, 3, 5))


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
        f"nn.Conv{n}d({t.shape[1]}, {out}, {kernel}, {stride}, {padding}, {dilations(pen, n)}, {groups},"
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
    stride, dilation = each(n, lambda: pen.int(1, 3)), dilations(pen, n)
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
    dilation = 1 if pen.chance(0.7) else dilations(pen, n)
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
