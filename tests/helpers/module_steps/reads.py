"""Steps that read values of attributes, containers, objects, buffers, and tensors independent of the input."""

from .registry import image_step, register_step


def draw_number(gen, low, high):
    """Return an expression of an integer in [low, high], stored where it may change between passes."""
    n, other, kind = gen.int(low, high), gen.int(low, high), gen.int(0, 10)
    if kind < 3:
        name = gen.bind(f"torch.tensor({n})") if kind == 0 else gen.buffer(f"torch.tensor({n})")
        gen.changes.append(f"{name}.fill_({other})")
        return gen.pick(f"{name}.item()", f"int({name})", f"{name}.tolist()", f"round(float({name} * 1.0))")
    if kind == 3:
        name = gen.bind(str(n))
        gen.changes.append(f"{name} = {other}")
        return name
    if kind < 7:
        expression, access = (
            (f"[{n}, 'a']", "[0]"), (f"{{'a': {{'b': {n}}}}}", "['a']['b']"), (f"SimpleNamespace(k={n})", ".k"),
        )[kind - 4]  # fmt: skip
        name = gen.bind(expression)
        gen.changes.append(f"{name}{access} = {other}")
        return name + access
    if kind == 7:
        return gen.bind(f"(lambda k: lambda: k)({n})") + "()"
    return gen.pick(
        f"torch.arange({n}, {n + 3}).tolist()[0]", f"int(torch.full((3,), {n}).max())",
        f"torch.tensor([0, {n}]).sum().item()", f"len(torch.ones({n}).nonzero())" if n > 0 else f"torch.tensor({n})",
        f"[int(k) for k in torch.linspace({n}, {n + 1}, 2)][0]", f"torch.eye(2)[0].long().mul({n}).numpy().sum()",
    )  # fmt: skip


@register_step(2)
def read_numbers(gen, x, t):
    d = t.dim()
    if not d:
        return None
    k, dim = draw_number(gen, 1, 3), gen.int(-d, -1)
    return gen.pick(
        f"{x} * {k}", f"{x} + float({k})", f"{x}.roll({k}, {dim})", f"{x}.narrow({dim}, 0, {k})", f"{x}[..., {k}:] * 2",
        f"{x}.flip({dim}) if {k} > 1 else {x} * 2", f"sum({x}.roll(i, {dim}) for i in range({k}))",
        f"F.pad({x}, [{k}, {draw_number(gen, 0, 2)}], value={draw_number(gen, -1, 1)})", f"{x}.clamp(-{k}, {k})",
        f"{x}.repeat_interleave({k}, {dim})", f"{x}.movedim({dim}, min({k}, {d - 1}))",
        f"{x} * torch.arange({k}).sum().item() + {x}.sum({dim}, keepdim=True) / {k}", f"{x}.unsqueeze(min({k}, {d}))",
        f"{x}.softmax(min({k}, {d - 1}))", f"{x}.cumsum(-min({k}, {d}))", f"{x}.diff(n={k}, dim={dim})",
        f"torch.cat([{x}] * {k}, {dim})", f"{x}.unfold({dim}, {k}, {draw_number(gen, 1, 2)}).mean(-1)",
    )  # fmt: skip


@register_step(1)
def read_scales(gen, x, t):
    name = gen.pick(gen.buffer, gen.bind)(f"torch.tensor([{gen.int(1, 9) / 4}, 1.5]).double()")
    gen.changes.append(f"{name}[0] = {gen.int(1, 9) / 4}")
    item = f"{name}[{gen.bind('[1, 0]')}[1]]"
    return gen.pick(
        f"{x} * {item}.item()", f"{x} / float({name}.norm())", f"{x}.clamp(max={name}.tolist()[0])",
        f"{x} + {x}.sin() if {item} > 1 else {x} - 1", f"{x} * sum({name}.tolist())", f"{x} * {item}",
        f"{x} + {name}.sum()",
        f"F.leaky_relu({x}, {item}.item())", f"torch.where({x} > {item}, {x}, {item} * {x})",
    )  # fmt: skip


@register_step(1)
def read_dims(gen, x, t):
    d = t.dim()
    if d < 2:
        return None
    dims, other = (sorted(gen.rng.sample(range(d), gen.int(1, d))) for _ in range(2))
    name = gen.bind(f"{dims}")
    gen.changes.append(f"{name}[:] = {other}")
    selected = gen.pick(
        name, f"tuple({name})", f"torch.arange(2, {x}.dim()).tolist()", f"torch.arange({d})[1:].tolist()",
        f"(torch.arange({d}) % 2).nonzero().flatten().tolist()",
    )  # fmt: skip
    return gen.pick(
        f"{x}.mean({selected}, keepdim=True) * {x}", f"{x} - {x}.amax({selected}, keepdim=True)",
        f"{x}.sum({selected})", f"{x}.flip({selected})",
        f"{x}.movedim({selected}, [-1 - i for i in range(len({selected}))])",
    )  # fmt: skip


@register_step(1)
def read_indices(gen, x, t):
    """Constant masks and indices, or buffers."""
    if not t.dim():
        return None
    dim = gen.int(-t.dim(), -1)
    n = t.shape[dim]
    indices = gen.buffer(f"torch.tensor({[gen.int(0, n - 1) for _ in range(gen.int(1, 4))]})")
    gen.changes.append(f"{indices}.fill_({gen.int(0, n - 1)})")
    mask = gen.buffer(f"torch.tensor({[True, *(gen.chance() for _ in range(n - 1))]})")
    sizes = [gen.int(1, n)]
    sizes = gen.bind(str([*sizes, n - sizes[0]]))
    prefix = ", ".join([":"] * (dim % t.dim()) + [""])
    return gen.pick(
        f"{x}.index_select({dim}, {indices})", f"{x}[{prefix}{indices}]", f"{x}[{prefix}{mask}]",
        f"{x}.index_select({dim}, {mask}.nonzero().flatten())", f"{x}[{prefix}torch.arange({n}) % 2 == 0]",
        f"torch.cat({x}.split({sizes}, {dim})[::-1], {dim})", f"sum({x}.select({dim}, int(k)) for k in {indices})",
        f"{x}.index_select({dim}, torch.unique({indices}))", f"{x}.repeat_interleave({mask}.long() + 1, {dim})",
        f"{x}.select({dim}, {indices}.max().item())",
    )  # fmt: skip


@register_step(1)
@image_step
def read_windows(gen, x, t, n):
    k = draw_number(gen, 1, 3)
    kernel = gen.bind(f"[{', '.join(str(gen.int(1, 3)) for _ in range(n))}]")
    gen.changes.append(f"{kernel}[0] = {gen.int(1, 3)}")
    return gen.pick(
        f"F.max_pool{n}d({x}, {kernel}, {k})", f"F.avg_pool{n}d({x}, {k}, {kernel})",
        f"F.conv{n}d({x}, {gen.parameter((1, t.shape[1], *[3] * n))}, padding={k}, stride={kernel})",
        f"F.interpolate({x}, scale_factor={k}.__float__())",
        f"sum(F.avg_pool{n}d({x}, 2 * i + 1, 1, i) for i in range({k}))",
    )  # fmt: skip
