"""Steps of reductions, spectra and normalisation."""

from .registry import draw_dims, draw_divisor, image_step, register_step

# Reductions.


@register_step(3)
def reduce(gen, x, t):
    if not t.dim():
        return None
    d, keepdim = draw_dims(gen, t), gen.chance()
    name = gen.pick("mean", "mean", "sum", "var", "std", "amax", "amin", "logsumexp", "norm")
    if name == "norm":
        return f"({x} + 0.01).norm(dim={d}, keepdim={keepdim})"
    options = f", correction={gen.int(0, 1)}" if name in ("var", "std") else ""
    return f"{x}.{name}({d}{options}, keepdim={keepdim})"


@register_step(1)
def reduce_all(gen, x, t):
    return gen.pick(f"{x} * {x}.mean()", f"{x} - {x}.max()", f"{x}.sum()", f"{x} / (1 + {x}.var())", f"{x} + {x}.min()")


@register_step(2)
def reduce_along_axis(gen, x, t):
    if not t.dim():
        return None
    d = gen.int(-t.dim(), t.dim() - 1)
    return gen.pick(
        f"{x}.softmax({d})", f"{x}.log_softmax({d})", f"{x}.cumsum({d})", f"{x}.max({d})[0]",
        f"{x}.min({d}, keepdim=True)[0]",
        f"{x} * ({x}.argmax({d}, keepdim=True) + 1)", f"F.normalize({x}, dim={d})", f"F.glu({x}, {d})",
        f"{x} * {x}.argmax({d}).double().mean()", f"{x}.sort({d})[0]", f"{x}.topk(1, {d})[0]", f"{x}.prod({d})",
        f"F.cosine_similarity({x}, {x}.flip({d}), {d})", f"{x} - {x}.mean({d}, keepdim=True)",
    )  # fmt: skip


@register_step(1.5)
def count(gen, x, t):
    """Integer and boolean results."""
    if not t.dim():
        return None
    d, keepdim = gen.int(-t.dim(), t.dim() - 1), gen.chance()
    return gen.pick(
        f"({x} > 0).any({d}, keepdim={keepdim}).double()", f"({x} > -1).all({d}).double()",
        f"({x} > 0).sum({d}).double()",
        f"(({x} > 0) & ({x} < 1)).roll(2, {d}) * {x}", f"({x} * 4).long().sum({d}, keepdim=True) + {x}",
        f"({x} * 4).long().flip({d}) % 3 * {x}", f"({x} * 4).long().amax({d}, keepdim={keepdim}).double()",
        f"F.one_hot({x}.argmax({d}), 40).double()",
        f"F.embedding({x}.argmax({d}), {gen.parameter((40, 3))}, padding_idx={gen.pick(None, 0)})",
        f"torch.where({x} > 1, torch.nan, {x}).nansum({d}, keepdim={keepdim})", f"{x} - {x}.median()",
        f"{x}.quantile(0.4, {d}, keepdim={keepdim})", f"torch.where({x} > 1, torch.nan, {x}).nanmedian({d})[0]",
        f"({x} > 0).double().mean({d}, keepdim=True) * {x}", f"F.pad(({x} > 0).long(), (1, 2)).double()",
        f"torch.where(({x} * 2).int().cumsum({d}) > 1, {x}, 0.0)", f"torch.logical_not({x} > 0).to({x}.dtype) * {x}",
        f"torch.var_mean({x}, {d}, keepdim={keepdim})[{gen.int(0, 1)}]", f"torch.aminmax({x}, dim={d})[0]",
        f"{x}.count_nonzero({d}).double()", f"({x} * 2).round() * {x}",
        f"torch.cat([({x} > 0), ({x} < 1)], {d}).double()",
    )  # fmt: skip


@register_step(0.7)
def costs(gen, x, t):
    if t.dim() < 2:
        return None
    reduction = f"reduction={gen.pick('mean', 'sum', 'none')!r}"
    target = f"{x}.argmax(1)"
    return gen.pick(
        f"F.cross_entropy({x}, {target}, {reduction})", f"F.nll_loss({x}.log_softmax(1), {target}, {reduction})",
        f"F.cross_entropy({x}, {x}.softmax(1).detach(), {reduction}, label_smoothing={gen.pick(0.0, 0.1)})",
        f"F.cross_entropy({x}, {target}, {reduction}, ignore_index=1, label_smoothing={gen.pick(0.0, 0.1)})",
        f"F.cross_entropy({x}, {target}, torch.linspace(1, 2, {t.shape[1]}).double(), {reduction})",
        f"F.binary_cross_entropy_with_logits({x}, ({x} > 0.1).double(), {reduction})",
        f"F.smooth_l1_loss({x}, {x}.flip(0).detach(), {reduction})", f"F.huber_loss({x}, {x}.square(), {reduction})",
        f"F.kl_div({x}.log_softmax(1), {x}.softmax(1).detach(), {reduction})", f"F.mse_loss({x}, {x} * 0, {reduction})",
    )  # fmt: skip


@register_step(1)
def linear_algebra(gen, x, t):
    if t.dim() < 2:
        return None
    n, d, e = t.shape[-1], *gen.rng.sample(range(-t.dim(), 0), 2)
    gram = f"({x}.mT @ {x} / {t.shape[-2]} + 2 * torch.eye({n}).double())"
    return gen.pick(
        f"torch.linalg.inv({gram})", f"torch.linalg.cholesky({gram})", f"torch.linalg.slogdet({gram})[1]",
        f"torch.linalg.solve({gram}, {x}.mT)", f"torch.linalg.eigvalsh({gram})", f"torch.matrix_exp({gram} / {n})",
        f"torch.linalg.solve_triangular({gram}, {x}.mT, upper={gen.chance()})", f"torch.linalg.svdvals({gram})",
        f"torch.linalg.matrix_power({gram}, {gen.int(-1, 2)})", f"torch.linalg.qr({gram})[1]", f"{gram}.logdet()",
        f"{x}.diagonal({gen.int(-1, 2)}, {d}, {e})", f"torch.diag_embed({x}, {gen.int(-1, 1)}, {d}, {e})",
        f"$ = {x} * 1; $.diagonal(0, {d}, {e}).mul_(2)", f"{x}.tril({gen.int(-1, 1)})", f"{x}.triu({gen.int(-1, 1)})",
    )  # fmt: skip


# Spectra and complex numbers, with real results.


@register_step(1.5)
def spectrum(gen, x, t):
    if not t.dim():
        return None
    d = tuple(sorted(gen.rng.sample(range(-t.dim(), 0), gen.int(1, min(t.dim(), 3)))))
    norm = gen.pick("", ", norm='ortho'")
    sizes = [t.shape[i] for i in d]
    longer = [n + gen.int(-2, 3) for n in sizes]
    spectrum = f"torch.fft.rfftn({x}, dim={d}{norm})"
    shape = [*t.shape]
    shape[d[-1]] = t.shape[d[-1]] // 2 + 1
    weight = gen.bind(f"nn.Parameter(torch.randn({[n if gen.chance(0.7) else 1 for n in shape]}, dtype=torch.cdouble))")
    return gen.pick(
        f"torch.fft.irfftn({spectrum} * {weight}, s={sizes}, dim={d}{norm})",
        f"torch.fft.irfftn({spectrum} * {weight}, s={longer}, dim={d}{norm})",
        f"torch.fft.fftn({x}, s={longer}, dim={d}).abs()",
        f"torch.view_as_real(torch.fft.ifft({x}, dim={d[0]}))",
        f"torch.fft.fft({x}, dim={d[0]}).{gen.pick('real', 'imag', 'conj().imag')}",
        f"torch.fft.hfft({x}, dim={d[0]})",
        f"torch.fft.fftshift(torch.fft.fftn({x}, dim={d}), dim={d}).real",
        f"torch.fft.ifftn(torch.fft.fftn({x}, dim={d}).flip({d[0]}), dim={d}).real",
    )


@register_step(1)
def complex_numbers(gen, x, t):
    if not t.dim():
        return None
    weight = gen.bind(f"nn.Parameter(torch.randn({[n if gen.chance() else 1 for n in t.shape]}, dtype=torch.cdouble))")
    matrix = gen.bind(f"nn.Parameter(torch.randn({t.shape[-1]}, 2, dtype=torch.cdouble))")
    z = f"torch.complex({x}, {gen.like(t) or x + '.sin()'})"
    return gen.pick(
        f"({z} * {weight}).real", f"({z} * {weight}.conj()).imag.sin()", f"({z} @ {matrix}).abs()",
        f"(torch.polar({x}.abs() + 0.1, {x}) + {weight}).angle().cos()", f"torch.view_as_real({z} / ({weight} + 3))",
        f"({z} - {z}.mean(-1, keepdim=True)).abs().square()", f"({z} * {weight}).sum(0).imag",
        f"torch.cat([{z}, {z}.conj() * {weight}], -1).real", f"{x} * {weight}.abs().sum()",
        f"torch.view_as_complex(torch.stack([{x}, {x}.cos()], -1)).exp().real",
        f"{z}.var(-1, keepdim=True) * {x}", f"torch.where({x} > 0, {z}, {weight}).imag",
    )  # fmt: skip


# Normalisation.


@register_step(3)
@image_step
def normalise(gen, x, t, n):
    c, cells = t.shape[1], list(t.shape[2:])
    affine = gen.chance(0.7)
    norm = gen.pick(
        f"nn.BatchNorm{n}d({c}, affine={affine}, track_running_stats={gen.chance(0.8)}, momentum={gen.pick(0.1, 0.3)})",
        f"nn.BatchNorm{n}d({c})",
        f"nn.InstanceNorm{n}d({c}, affine={affine}, track_running_stats={gen.chance(0.3)})",
        f"nn.GroupNorm({draw_divisor(gen, c)}, {c}, affine={affine})",
        f"nn.LayerNorm({[c, *cells]}, elementwise_affine={affine})",
        f"nn.LayerNorm({cells}, elementwise_affine={affine})",
        f"nn.LayerNorm({cells[-1:]}, bias={gen.chance()})",
        f"nn.RMSNorm({gen.pick([c, *cells], cells[-1:])})",
        "nn.LocalResponseNorm(2)",
    )
    return f"{gen.bind(norm)}({_contiguous(x) if 'BatchNorm' in norm else x})"


def _contiguous(x):
    """Return a contiguous batch norm input: for channels-last strides of one row, PyTorch's gradients are wrong."""
    return f"{x}.contiguous()"


@register_step(1)
def layer_norm(gen, x, t):
    return f"F.layer_norm({x}, {list(t.shape[gen.int(1, t.dim() - 1) :])})" if t.dim() > 1 else None


@register_step(1)
@image_step
def computed_weights(gen, x, t, n):
    """Weights computed from cells, which are distributed over ranks."""
    c, last, ones = t.shape[1], t.shape[-1], ", 1" * n
    values = f"{x}.flatten()[:{c}]"
    return gen.pick(
        f"F.conv{n}d({x}, {values}.reshape({c}, 1{ones}), {values}, groups={c})",
        f"F.conv_transpose{n}d({x}, {values}.reshape({c}, 1{ones}), {values}, groups={c})",
        f"F.batch_norm({_contiguous(x)}, None, None, {values}, {values}, True)",
        f"F.instance_norm({x}, weight={values}, bias={values})",
        f"F.group_norm({x}, {draw_divisor(gen, c)}, {values}, {values})", f"F.prelu({x}, {values})",
        f"F.layer_norm({x}, {[last]}, {x}.flatten()[:{last}], {x}.flatten()[-{last}:])",
        f"F.linear({x}, {x}.flatten()[:{2 * last}].reshape(2, -1), {x}.flatten()[:2])",
        f"F.cross_entropy({x}, {x}.argmax(1), {values}.abs() + 1)",
    )  # fmt: skip
