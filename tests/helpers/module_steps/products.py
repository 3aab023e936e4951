"""Steps of products, of functions with gradients of their own, and of one index each."""

from .registry import divisor, image, step

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
        ("a * 2", "(3 * g).tanh()"),
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
