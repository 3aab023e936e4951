"""Steps of matrix products, custom gradients and pointwise operators."""

from .registry import draw_divisor, image_step, register_step

# Products and attention.


@register_step(1)
@image_step
def channel_linear(gen, x, t, n):
    layer = gen.bind(f"nn.Linear({t.shape[1]}, {gen.int(1, 5)}, bias={gen.chance()})")
    return f"{layer}({x}.movedim(1, -1)).movedim(-1, 1)"


@register_step(1)
def last_linear(gen, x, t):
    if not t.dim():
        return None
    layer = gen.bind(f"nn.Linear({t.shape[-1]}, {gen.int(1, 5)}, bias={gen.chance()})")
    return f"{layer}({x})"


@register_step(1)
def flat_linear(gen, x, t):
    if t.dim() < 2:
        return None
    layer = gen.bind(f"nn.Linear({t[0].numel()}, {gen.int(1, 5)})")
    return f"{layer}({x}.flatten(1))"


@register_step(1.5)
def products(gen, x, t):
    if t.dim() < 2:
        return None
    weight = gen.parameter((t.shape[-1], gen.int(1, 4)))
    flat = f"{x}.flatten(2)" if t.dim() > 2 else x
    letters = "ncdefgh"[: t.dim()]
    return gen.pick(
        f"{x} @ {weight}", f"{x} @ {x}.transpose(-1, -2)", f"{x}.mT @ {x}", f"{flat} @ {flat}.mT / 5",
        f"{flat}.mT @ {flat} / 5",
        f"({flat}.mT @ {flat} / 5).softmax(-1) @ {flat}.mT",
        f"torch.einsum('{letters},{letters}->{letters[:2]}', {x}, {x})",
        f"torch.einsum('{letters},{letters[1]}k->{letters.replace('c', 'k')}', {x}, {gen.parameter((t.shape[1], 3))})",
        f"torch.bmm({flat}, {flat}.transpose(1, 2)) / 9",
        f"{x} @ {gen.parameter((t.shape[-1],))}", f"torch.outer({x}.flatten()[:5], {x}.mean((0,)).flatten()[:4])",
        f"F.bilinear({x}, {x}, {gen.parameter((2, t.shape[-1], t.shape[-1]))})",
    )  # fmt: skip


@register_step(2)
@image_step
def attention(gen, x, t, n):
    c = t.shape[1]
    heads = draw_divisor(gen, c)
    tokens = f"{x}.flatten(2).transpose(1, 2)"
    to_image = f".transpose(1, 2).reshape({list(t.shape)})"
    per_head = f"{x}.flatten(2).unflatten(1, ({heads}, {c // heads})).transpose(2, 3)"
    qkv = f"{gen.bind(f'nn.Linear({c}, {3 * c})')}({tokens})"
    qkv += f".reshape({t.shape[0]}, -1, 3, {heads}, {c // heads}).permute(2, 0, 3, 1, 4)"
    multihead = gen.bind(f"nn.MultiheadAttention({c}, {heads}, batch_first=True)")
    layer = gen.bind(
        f"nn.TransformerEncoderLayer({c}, {heads}, 5, dropout=0.0, batch_first=True, norm_first={gen.chance()})"
    )
    return gen.pick(
        f"F.scaled_dot_product_attention({tokens}, {tokens}, {tokens}){to_image}",
        f"F.scaled_dot_product_attention({per_head}, {per_head}, {per_head}).transpose(2, 3).reshape({list(t.shape)})",
        f"F.scaled_dot_product_attention(*{qkv}.unbind(0)).transpose(1, 2).flatten(2){to_image}",
        f"{multihead}(*[{tokens}] * 3){gen.pick('[0]' + to_image, '[1]', '[0]')}",
        f"{layer}({tokens}){gen.pick(to_image, '')}",
        f"F.scaled_dot_product_attention({tokens}, {tokens}, {tokens}, is_causal=True){to_image}",
        f"({tokens} + {gen.parameter((1, t[0, 0].numel(), c))}){to_image}",
        f"torch.cat([{gen.parameter((1, 1, c))}.expand({t.shape[0]}, -1, -1), {tokens}], 1)",
    )


@register_step(0.7)
@image_step
def recurrent(gen, x, t, n):
    """Recurrent layers over the cells of a sample, over one axis of cells, or over the samples."""
    kind = gen.pick("LSTM(", "GRU(", "RNN(", "LSTM(proj_size=2, ")
    layer = gen.bind(
        f"nn.{kind}input_size={t.shape[1]}, hidden_size=3, num_layers={gen.int(1, 2)}, bias={gen.chance()},"
        f" batch_first={gen.chance()}, bidirectional={gen.chance()})"
    )
    sequences = gen.pick(f"{x}.flatten(2).mT", f"{x}.movedim(1, -1).flatten(0, -3)")
    return f"{layer}({sequences}){gen.pick('[0]', '[0]', '[0].mT')}"


@register_step(1.5)
@image_step
def window_attention(gen, x, t, n):
    """Attention in windows, by views."""
    if n != 2:
        return None
    b, c, h, w = t.shape
    i, j = draw_divisor(gen, h), draw_divisor(gen, w)
    windows = f"{x}.reshape({b}, {c}, {h // i}, {i}, {w // j}, {j}).permute(0, 2, 4, 3, 5, 1).reshape(-1, {i * j}, {c})"
    mixed = gen.pick(
        f"F.scaled_dot_product_attention(*[{windows}] * 3)", f"{windows}.softmax(1)", f"{windows}.cumsum(1)"
    )
    return (
        f"{mixed}.reshape({b}, {h // i}, {w // j}, {i}, {j}, {c}).permute(0, 5, 1, 3, 2, 4).reshape({b}, {c}, {h}, {w})"
    )


# Custom gradients.


@register_step(0.7)
def custom_function(gen, x, t):
    """autograd.Function, pointwise or not."""
    forward, backward = gen.pick(
        ("a.sign()", "g * 2"), ("a * 2", "(-g).clamp(-1, 1)"), ("a.round().clamp(-1, 1)", "g * (a.abs() < 1)"),
        ("a - a.mean()", "g"), ("a * 1", "g / a.numel()"), ("a.flip(-1)", "g"), ("a + len(a)", "g + 1"),
        ("a * 2", "(3 * g).tanh()"),
    )  # fmt: skip
    saving, loaded = ("c.save_for_backward(a), ", "(lambda a: $)(*c.saved_tensors)")
    functions = {
        "forward": f"lambda c, a: ({saving}{forward})[1]",
        "backward": f"lambda c, g: {loaded.replace('$', backward)}",
    }
    body = ", ".join(f"'{name}': staticmethod({text})" for name, text in functions.items())
    cells = f"{x} * 1.0" if gen.chance(0.7) or t.dim() < 2 else f"{x}.mean(-1)"
    return f"$ = type('Own', (torch.autograd.Function,), {{{body}}}).apply({cells})"


# Pointwise operators and broadcasting.


@register_step(0.7)
def detach(gen, x, t):
    return gen.pick(
        f"{x} * {x}.detach()",
        f"with torch.no_grad(): $ = {x} * {x}.mean()",
        f"{x} * {x}.detach().sum(-1, keepdim=True)" if t.dim() else None,
    )


@register_step(4)
def pointwise(gen, x, t):
    return gen.pick(
        f"F.relu({x})", f"F.gelu({x})", f"{x}.sigmoid()", f"F.silu({x})", f"F.leaky_relu({x}, 0.2)", f"F.elu({x})",
        f"F.hardswish({x})", f"{x}.tanh().exp()", f"{x}.clamp(-1, 0.7)", f"1 - {x} * 2", f"{x} / 3 + 1",
        f"{x}.clamp(min=0.1)",
        f"{x}.masked_fill({x} > 0.5, 0.1)", f"torch.where({x} > 0, {x}, 0.1 * {x})", f"({x} > 0).to({x}.dtype) * {x}",
        f"{x}.masked_fill({x}.sum(-1, keepdim=True) > 0.5, 0.1)" if t.dim() else None, f"{x}.abs().sqrt()",
        f"F.dropout({x}, 0.0, True)", f"{x} * ({x} * 3).long()", f"torch.zeros_like({x}) + {x}.square()",
        f"{gen.bind('nn.PReLU()')}({x})", f"torch.full_like({x}, 2.0) * {x}", f"F.softplus({x})",
        f"{x}.double().type_as({x})",
        f"{x}.new_zeros({list(t.shape)}) + {x}", f"{x}.new_ones(1) * {x}", f"torch.lerp({x}, {x}.sin(), 0.3)",
    )  # fmt: skip


@register_step(3)
def combine(gen, x, t):
    y = gen.like(t)
    if y is None:
        return None
    return gen.pick(
        f"{x} + {y}", f"{x} * {y}", f"torch.maximum({x}, {y})", f"torch.where({x} > {y}, {x}, 0.5)", f"{x} - 0.5 * {y}",
        f"torch.add({x}, {y}, alpha=2)", f"torch.addcmul({x}, {y}, {y}, value=0.5)", f"F.mse_loss({x}, {y})",
        f"({x} > {y}) * {x}", f"{x}.clamp(max={y})", f"F.l1_loss({x}, {y}, reduction='none')",
    )  # fmt: skip


@register_step(3)
def broadcast(gen, x, t):
    kind = gen.int(0, 4)
    if kind == 0:
        shape = tuple(t.shape[gen.int(0, t.dim()) :])
    elif kind == 1 and t.dim() > 1:
        shape = (1, *t.shape[1:])
    elif kind == 2 and t.dim() > 2:
        shape = (t.shape[1], *[1] * (t.dim() - 2))
    else:
        shape = tuple(n if gen.chance() else 1 for n in t.shape)
    weight = gen.parameter(shape)
    return gen.pick(
        f"{x} + {weight}", f"{x} * {weight}", f"{weight} - {x}", f"torch.where({x} > {weight}, {x}, {weight})",
        f"{weight}.expand_as({x}) * {x}", f"{x} * {weight} + {weight}.sum()",
        f"{x} + {weight}.relu().sum(0)" if shape else None,
        f"torch.cat([{x}, {weight}.expand_as({x})], 0)" if shape else None,
    )  # fmt: skip


@register_step(1.5)
def small_broadcast(gen, x, t):
    """Broadcast a smaller tensor of the module."""
    names = [name for name, other in gen.tensors.items() if other.dim() < t.dim() or other.numel() < t.numel()]
    return f"{x} {gen.pick('+', '*')} {gen.pick(*names)}" if names else None


@register_step(1.5)
@image_step
def gate(gen, x, t, n):
    cells, c = tuple(range(2, n + 2)), t.shape[1]
    a, b = gen.bind(f"nn.Linear({c}, 2)"), gen.bind(f"nn.Linear(2, {c})")
    spatial = gen.bind(f"nn.Conv{n}d(2, 1, 3, padding=1)")
    channel = gen.bind(f"nn.Conv{n}d({c}, {c}, 1)")
    return gen.pick(
        f"{x} * {b}({a}({x}.mean({cells})).relu()).sigmoid()[(...,) + (None,) * {n}]",
        f"{x} * {spatial}(torch.cat([{x}.mean(1, keepdim=True), {x}.amax(1, keepdim=True)], 1)).sigmoid()",
        f"{x} * {channel}(F.adaptive_avg_pool{n}d({x}, 1)).sigmoid()",
        f"{x} + {channel}({x}).relu()",
        f"{channel}({channel}({x}))",
    )


@register_step(1.5)
@image_step
def coordinates(gen, x, t, n):
    batch, _, *cells = t.shape
    axes = ", ".join(f"torch.{gen.pick(f'arange({m})', f'linspace(-1, 1, {m})', f'ones({m})')}" for m in cells)
    grid = f"torch.stack([g.double() for g in torch.meshgrid({axes}, indexing='ij')])"
    return gen.pick(
        f"torch.cat([{x}, {grid}[None].expand({batch}, {', '.join(['-1'] * (n + 1))})], 1)",
        f"{x} + {grid}.sum(0)",
        f"{x} * torch.linspace(0, 1, {cells[-1]})",
        f"{x} * (torch.arange({cells[0]}) % 2)[(...,) + (None,) * {n - 1}]",
        f"F.grid_sample({x}, torch.zeros({batch}, 3, 3, 2).double(), align_corners=False)"
        if n == 2 and gen.chance(0.1)
        else None,
        f"torch.cat([{x}, torch.zeros({batch}, 1, {', '.join(map(str, cells))})], 1)",
    )


@register_step(2)
def in_place(gen, x, t):
    d = t.dim()
    if not d:
        return None
    index = [gen.pick(":", ":", "1:", ":-1", "::2", "1::2", ":2", "-1:") for _ in range(d)]
    item = f"[{', '.join(index)}]"
    return gen.pick(
        f"$ = {x}.clone(); ${item} += 1", f"$ = {x} * 1.0; ${item} = 0.5", f"$ = {x} * 2; $.add_(1).relu_()",
        f"$ = {x} + 0; ${item} *= {x}{item}", f"$ = {x} * 1; $[0] = 1.5", f"$ = {x} * 1; ${item} = {x}{item}.flip(-1)",
        f"$ = torch.zeros_like({x}); ${item} = {x}{item}", f"$ = F.relu({x} * 2, inplace=True); $.mul_({x})",
        f"$ = {x} * 1; $.clamp_(-1, 1); $[..., 0] += 2",
    )  # fmt: skip
