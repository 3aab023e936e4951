"""Steps that read neighbouring cells, move cells or regroup dimensions."""

from .registry import draw_divisor, draw_tuple, image_step, register_step

# Windows.


def draw_dilations(gen, n):
    """Return dilations, mostly 1; some exceed a tile."""
    return draw_tuple(n, lambda: gen.pick(1, 1, 1, 1, 2, 2, 3, 5))


@register_step(5)
@image_step
def conv(gen, x, t, n):
    groups = draw_divisor(gen, t.shape[1]) if gen.chance(0.3) else 1
    out = groups * gen.int(1, 4)
    same = gen.chance(0.15)
    stride = 1 if same or gen.chance() else draw_tuple(n, lambda: gen.int(1, 3))
    mode = gen.pick("zeros", "zeros", "zeros", "reflect", "replicate", "circular")
    padding = repr("same") if same else draw_tuple(n, lambda: gen.int(0, 3))
    kernel = draw_tuple(n, lambda: gen.int(1, 4)) if gen.chance() else 3
    layer = gen.bind(
        f"nn.Conv{n}d({t.shape[1]}, {out}, {kernel}, {stride}, {padding}, {draw_dilations(gen, n)}, {groups},"
        f" {gen.chance()}, {mode!r})"
    )
    return f"{layer}({x})"


@register_step(1)
@image_step
def conv_function(gen, x, t, n):
    weight = gen.parameter((t.shape[1], 1, *draw_tuple(n, lambda: gen.int(1, 4))))
    pads = [gen.int(0, 3) for _ in range(2 * n)]
    return f"F.conv{n}d(F.pad({x}, {pads}), {weight}, stride={gen.int(1, 2)}, groups={t.shape[1]})"


@register_step(2)
@image_step
def conv_transpose(gen, x, t, n):
    groups = draw_divisor(gen, t.shape[1]) if gen.chance(0.3) else 1
    stride, dilation = draw_tuple(n, lambda: gen.int(1, 3)), draw_dilations(gen, n)
    extra = tuple(gen.int(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    padding = draw_tuple(n, lambda: gen.int(0, 2))
    layer = gen.bind(
        f"nn.ConvTranspose{n}d({t.shape[1]}, {groups * gen.int(1, 3)}, {draw_tuple(n, lambda: gen.int(1, 4))},"
        f" {stride}, {padding}, {extra}, {groups}, {gen.chance()}, {dilation})"
    )
    return f"{layer}({x})"


@register_step(2)
@image_step
def max_pool(gen, x, t, n):
    kernel = draw_tuple(n, lambda: gen.int(1, 4))
    padding = tuple(gen.int(0, k // 2) for k in kernel)
    stride = None if gen.chance(0.3) else draw_tuple(n, lambda: gen.int(1, 3))
    dilation = 1 if gen.chance(0.7) else draw_dilations(gen, n)
    return f"F.max_pool{n}d({x}, {kernel}, {stride}, {padding}, {dilation}, {gen.chance()})"


@register_step(2)
@image_step
def avg_pool(gen, x, t, n):
    kernel = draw_tuple(n, lambda: gen.int(1, 4))
    padding = tuple(gen.int(0, k // 2) for k in kernel)
    stride = None if gen.chance(0.3) else draw_tuple(n, lambda: gen.int(1, 3))
    divisor = f", {gen.int(1, 5)}" if n > 1 and gen.chance(0.2) else ""
    return f"F.avg_pool{n}d({x}, {kernel}, {stride}, {padding}, {gen.chance()}, {gen.chance()}{divisor})"


@register_step(0.7)
@image_step
def max_pool_indices(gen, x, t, n):
    kernel, stride, padding = gen.int(1, 3), gen.int(1, 3), gen.int(0, 1)
    pool = f"F.max_pool{n}d({x}, {kernel}, {stride}, {min(padding, kernel // 2)}, return_indices=True)"
    size = f"output_size={list(t.shape[2:])}"
    return gen.pick(
        f"y, i = {pool}; $ = y * (i % 5)",
        f"y, i = {pool}; $ = F.max_unpool{n}d(y, i, {kernel}, {stride}, {padding}, {size})",
        f"y, i = {pool}; $ = F.max_unpool{n}d(y, i, {kernel}, {stride}, {padding}, {size})" if n == 2 else None,
    )


@register_step(0.5)
@image_step
def lp_pool(gen, x, t, n):
    return f"F.lp_pool{n}d({x}.abs() + 0.1, {gen.int(1, 3)}, {gen.int(1, 3)}, {gen.int(1, 3)}, {gen.chance()})"


@register_step(2)
@image_step
def adaptive_pool(gen, x, t, n):
    size = gen.pick(1, gen.int(1, 6), draw_tuple(n, lambda: gen.pick(None, gen.int(1, 9))))
    return f"F.adaptive_{gen.pick('avg', 'avg', 'max')}_pool{n}d({x}, {size})"


@register_step(0.5)
@image_step
def unfold_image(gen, x, t, n):
    if n != 2:
        return None
    arguments = f"{gen.int(1, 3)}, {gen.int(1, 2)}, {gen.int(0, 1)}, {gen.int(1, 2)}"
    columns = f"F.unfold({x}, {arguments})"
    return columns if gen.chance() else f"F.fold({columns}, {tuple(t.shape[2:])}, {arguments})"


@register_step(0.7)
def unfold_tensor(gen, x, t):
    if not t.dim():
        return None
    return f"{x}.unfold({gen.int(0, t.dim() - 1)}, {gen.int(1, 4)}, {gen.int(1, 3)})"


# Resampling and padding.


@register_step(2.5)
@image_step
def pad(gen, x, t, n):
    mode = gen.pick("constant", "constant", "reflect", "replicate", "circular")
    low = -2 if gen.chance(0.4) else 0
    axes = gen.int(1, n + (mode == "constant")) if mode == "constant" else n
    amounts = [gen.int(low, 4) for _ in range(2 * axes)]
    value = f", value={gen.pick(0.0, 1.5)}" if mode == "constant" else ""
    return f"F.pad({x}, {amounts}, mode={mode!r}{value})"


@register_step(3)
@image_step
def interpolate(gen, x, t, n):
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[n]
    mode = gen.pick("nearest", "nearest-exact", "area", *smooth, *smooth)
    options = f", mode={mode!r}"
    if mode in smooth:
        options += f", align_corners={gen.chance()}" + (f", antialias={gen.chance(0.3)}" if n == 2 else "")
    if gen.chance():
        return f"F.interpolate({x}, size={draw_tuple(n, lambda: gen.int(1, 14 if n < 3 else 6))}{options})"
    factor = gen.pick(2, 2.0, 3, 0.5, 1.7, 2.3, 0.6, draw_tuple(n, lambda: gen.pick(1.0, 1.5, 2.0, 0.7)))
    factors = factor if isinstance(factor, tuple) else (factor,) * n
    rescaled = [m for m, f in zip(t.shape[2:], factors, strict=True) if f not in (1, 2) and int(m * f) in (m, 2 * m)]
    if mode.startswith("nearest") and rescaled:  # PyTorch's gradient uses a different factor here
        return None
    rescale = f", recompute_scale_factor={gen.pick(True, None)}"
    return f"F.interpolate({x}, scale_factor={factor}{options}{rescale})"


@register_step(1)
@image_step
def pixels(gen, x, t, n):
    r = gen.int(2, 3)
    return f"F.{gen.pick('pixel_shuffle', 'pixel_unshuffle')}({x}, {r})" if n == 2 else None


@register_step(0.5)
@image_step
def channel_shuffle(gen, x, t, n):
    return f"F.channel_shuffle({x}, {draw_divisor(gen, t.shape[1])})"


# Movement of cells.


@register_step(3)
def slice_axes(gen, x, t):
    index = []
    for _ in range(t.dim()):
        start, end, stride = (
            gen.pick(None, None, 0, 1, 2, -3),
            gen.pick(None, None, None, -1, -2, 5),
            gen.pick(1, 1, 2, 3),
        )
        index.append(
            ":" if gen.chance(0.4) else f"{'' if start is None else start}:{'' if end is None else end}:{stride}"
        )
    return f"{x}[{', '.join(index)}]" if index else None


@register_step(0.7)
def select(gen, x, t):
    if not t.dim():
        return None
    return f"{x}.select({gen.int(0, t.dim() - 1)}, {gen.pick(0, -1)})"


@register_step(1)
def flip(gen, x, t):
    return f"{x}.flip({[d for d in range(t.dim()) if gen.chance()]})"


@register_step(1.2)
def roll(gen, x, t):
    if not t.dim():
        return None
    dims = gen.rng.sample(range(-t.dim(), 0), gen.int(1, t.dim()))
    return f"{x}.roll({tuple(gen.int(-17, 17) for _ in dims)}, {tuple(dims)})"


@register_step(2)
def cat(gen, x, t):
    if not t.dim():
        return None
    d = gen.int(-t.dim(), t.dim() - 1)
    return f"torch.{gen.pick('cat', 'cat', 'cat', 'stack')}([{x}, {gen.like(t) or x + '.sin()'}], {d})"


@register_step(1)
def split(gen, x, t):
    if not t.dim():
        return None
    d = gen.int(-t.dim(), t.dim() - 1)
    n, index = t.shape[d], gen.int(0, 1)
    cut = gen.int(1, max(1, n - 1))
    return gen.pick(
        f"{x}.split({gen.int(1, 4)}, {d})[{index}]",
        f"{x}.split([{cut}, {n - cut}], {d})[{index}]",
        f"{x}.chunk({gen.int(1, 4)}, {d})[{index}]",
        f"{x}.narrow({d}, {n // 3}, {max(1, n // 2)})",
        f"{x}.unbind({d})[{index}]",
        f"torch.cat({x}.chunk(2, {d})[::-1], {d})",
        f"torch.tensor_split({x}, 2, {d})[{index}]",
    )


@register_step(1)
def index(gen, x, t):
    if not t.dim():
        return None
    d = gen.int(0, t.dim() - 1)
    index = [gen.int(0, t.shape[d] - 1) for _ in range(gen.int(1, 5))]
    return gen.pick(
        f"{x}.index_select({d}, torch.tensor({index}))",
        f"{x}[{':, ' * d}torch.tensor({index})]",
        f"{x}.repeat_interleave({gen.int(1, 3)}, {d})",
        f"{x}[{':, ' * d}{index}]",
    )


@register_step(2)
def index_by_values(gen, x, t):
    if not t.dim():
        return None
    d = gen.int(-t.dim(), t.dim() - 1)
    n, dots = t.shape[d], ":, " * (d % t.dim())
    index = [gen.int(0, n - 1) for _ in range(gen.int(1, n))]
    tensor, first = f"torch.tensor({index})", f"{x}.narrow({d}, 0, {len(index)})"
    order, y = f"{x}.argsort({d})", gen.like(t) or f"{x}.cos()"
    fewer = "".join(f".narrow({e}, 0, {gen.int(1, m)})" for e, m in enumerate(t.shape) if gen.chance(0.2))
    both = [f"torch.tensor({draw_tuple(3, lambda m=m: gen.int(0, m - 1))})" if gen.chance() else ":" for m in t.shape]
    unique = f"torch.tensor({sorted(set(index))})"
    return gen.pick(
        f"{x}.gather({d}, {order}{fewer})", f"{x}.gather({d}, {order}.narrow({d}, 0, 1))",
        f"{x}.take_along_dim({x}.mean({d}, keepdim=True).argsort(0), {d})", f"{x}.take({order} + {x}.shape[0])",
        f"{x}.scatter({d}, {order}, {y})", f"{x}.scatter({d}, {x}.argmax({d}, keepdim=True), 0.5)",
        f"torch.zeros_like({x}).scatter_add({d}, {order} // 2, {y})",
        f"{x}.scatter_reduce({d}, {order}, {y}, {gen.pick('sum', 'mean', 'amax')!r}, include_self={gen.chance()})",
        f"{x}.index_add({d}, {tensor}, {first}.sin())", f"{x}.index_copy({d}, {unique}, {y}[{dots}{unique}])",
        f"{x}.index_fill({d}, {tensor}, {gen.pick('1.5', x + '.mean()')})",
        f"$ = {x} * 1; $[{dots}{tensor}] = {gen.pick('0.5', x + '.mean()', f'{y}[{dots}{index[:1]}]')}",
        f"$ = {x} * 1; $[{dots}{unique}] = {y}[{dots}{unique}]", f"$ = {x} * 1; $[$ > 0.3] = {y}.mean()",
        f"$ = {x} * 1; $[{dots}torch.arange({n}) % 2 == 0] = 0.3", f"{x}[{', '.join(both)}]",
        f"$ = {x} * 1; $[{', '.join(both)}] = {x}.mean()",
        f"torch.bucketize({x}, torch.linspace(-1, 1, 5).double()) * {x}",
        f"torch.searchsorted({x}.sort(-1)[0], {y}.contiguous()) * {x}",
    )  # fmt: skip


# Regrouping of dimensions.


@register_step(1.5)
def permute(gen, x, t):
    n = t.dim()
    if n < 2:
        return None
    order = gen.rng.sample(range(n), n)
    a, b = order[:2]
    return gen.pick(
        f"{x}.permute({order})",
        f"{x}.transpose({a}, {b - n})",
        f"{x}.movedim({a}, {b})",
        f"{x}.mT",
        f"{x}.swapaxes({a}, {b})",
    )


@register_step(1)
def change_memory_format(gen, x, t):
    """Change the memory format."""
    last = {4: "channels_last", 5: "channels_last_3d"}.get(t.dim())
    return gen.pick(f"{x}.contiguous()", f"{x}.contiguous(memory_format=torch.{last})" if last else None)


@register_step(2)
def reshape(gen, x, t):
    n, shape = t.dim(), list(t.shape)
    if not n:
        return None
    a = gen.int(0, n - 1)
    b = gen.int(a, n - 1)
    k = draw_divisor(gen, shape[a])
    split_shape = [*shape[:a], k, shape[a] // k, *shape[a + 1 :]]
    joined_shape = [*shape[:a], -1, *shape[b + 1 :]]
    return gen.pick(
        f"{x}.flatten({a}, {b})",
        f"{x}.unflatten({a}, ({k}, {shape[a] // k}))",
        f"{x}.reshape({split_shape})",
        f"{x}.reshape({joined_shape})",
        f"{x}.unsqueeze({a})",
        f"{x}.squeeze()",
        f"{x}.contiguous().view({joined_shape})",
        f"{x}.view({gen.pick(joined_shape, split_shape)})",
        f"{x}.reshape({[*shape[::-1]]})",
    )


@register_step(1)
def repeat(gen, x, t):
    n = t.dim()
    if not n:
        return None
    return gen.pick(
        f"{x}.repeat({[gen.pick(1, 1, 1, 2) for _ in range(n)]})",
        f"{x}.expand({gen.int(1, 2)}, {', '.join(['-1'] * n)})",
        f"{x}[:, :1].expand({', '.join(['-1'] * n)})",
        f"{x}[:, :1].expand_as({x})",
        f"torch.tile({x}, ({', '.join(str(gen.pick(1, 2)) for _ in range(2))}))",
    )


@register_step(2)
@image_step
def tokens(gen, x, t, n):
    return f"{x}.flatten(2){gen.pick('', '.transpose(1, 2)')}"


@register_step(2)
def restore_shape(gen, x, t):
    """Reshape to the shape of another tensor, such as tokens to an image."""
    shapes = [other.shape for other in gen.tensors.values() if other.numel() == t.numel() and other.shape != t.shape]
    return f"{x}.reshape({list(gen.pick(*shapes))})" if shapes else None
