"""Steps that make a few numbers of many, spectra, and norms."""

from .registry import dims, divisor, image, step

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
