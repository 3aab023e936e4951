"""Steps whose code reads numbers: of attributes, containers, objects, buffers, and tensors that no input reaches."""

from .registry import image, step


def number(pen, low, high):
    """Return an expression of an integer from low to high, kept somewhere, where a change may come between passes."""
    n, other, kind = pen.int(low, high), pen.int(low, high), pen.int(0, 10)
    if kind < 3:
        name = pen.made(f"torch.tensor({n})") if kind == 0 else pen.buffer(f"torch.tensor({n})")
        pen.later.append(f"{name}.fill_({other})")
        return pen.one(f"{name}.item()", f"int({name})", f"{name}.tolist()", f"round(float({name} * 1.0))")
    if kind == 3:
        name = pen.made(str(n))
        pen.later.append(f"{name} = {other}")
        return name
    if kind < 7:
        made, where = (
            (f"[{n}, 'a']", "[0]"), (f"{{'a': {{'b': {n}}}}}", "['a']['b']"), (f"SimpleNamespace(k={n})", ".k"),
        )[kind - 4]  # fmt: skip
        name = pen.made(made)
        pen.later.append(f"{name}{where} = {other}")
        return name + where
    if kind == 7:
        return pen.made(f"(lambda k: lambda: k)({n})") + "()"
    return pen.one(
        f"torch.arange({n}, {n + 3}).tolist()[0]", f"int(torch.full((3,), {n}).max())",
        f"torch.tensor([0, {n}]).sum().item()", f"len(torch.ones({n}).nonzero())" if n > 0 else f"torch.tensor({n})",
        f"[int(k) for k in torch.linspace({n}, {n + 1}, 2)][0]", f"torch.eye(2)[0].long().mul({n}).numpy().sum()",
    )  # fmt: skip


@step(2)
def read_numbers(pen, x, t):
    d = t.dim()
    if not d:
        return None
    k, at = number(pen, 1, 3), pen.int(-d, -1)
    return pen.one(
        f"{x} * {k}", f"{x} + float({k})", f"{x}.roll({k}, {at})", f"{x}.narrow({at}, 0, {k})", f"{x}[..., {k}:] * 2",
        f"{x}.flip({at}) if {k} > 1 else {x} * 2", f"sum({x}.roll(i, {at}) for i in range({k}))",
        f"F.pad({x}, [{k}, {number(pen, 0, 2)}], value={number(pen, -1, 1)})", f"{x}.clamp(-{k}, {k})",
        f"{x}.repeat_interleave({k}, {at})", f"{x}.movedim({at}, min({k}, {d - 1}))",
        f"{x} * torch.arange({k}).sum().item() + {x}.sum({at}, keepdim=True) / {k}", f"{x}.unsqueeze(min({k}, {d}))",
        f"{x}.softmax(min({k}, {d - 1}))", f"{x}.cumsum(-min({k}, {d}))", f"{x}.diff(n={k}, dim={at})",
        f"torch.cat([{x}] * {k}, {at})", f"{x}.unfold({at}, {k}, {number(pen, 1, 2)}).mean(-1)",
    )  # fmt: skip


@step(1)
def read_scales(pen, x, t):
    name = pen.one(pen.buffer, pen.made)(f"torch.tensor([{pen.int(1, 9) / 4}, 1.5]).double()")
    pen.later.append(f"{name}[0] = {pen.int(1, 9) / 4}")
    at = f"{name}[{pen.made('[1, 0]')}[1]]"
    return pen.one(
        f"{x} * {at}.item()", f"{x} / float({name}.norm())", f"{x}.clamp(max={name}.tolist()[0])",
        f"{x} + {x}.sin() if {at} > 1 else {x} - 1", f"{x} * sum({name}.tolist())", f"{x} * {at}",
        f"{x} + {name}.sum()",
        f"F.leaky_relu({x}, {at}.item())", f"torch.where({x} > {at}, {x}, {at} * {x})",
    )  # fmt: skip


@step(1)
def read_dims(pen, x, t):
    d = t.dim()
    if d < 2:
        return None
    dims, other = (sorted(pen.rng.sample(range(d), pen.int(1, d))) for _ in range(2))
    name = pen.made(f"{dims}")
    pen.later.append(f"{name}[:] = {other}")
    those = pen.one(
        name, f"tuple({name})", f"torch.arange(2, {x}.dim()).tolist()", f"torch.arange({d})[1:].tolist()",
        f"(torch.arange({d}) % 2).nonzero().flatten().tolist()",
    )  # fmt: skip
    return pen.one(
        f"{x}.mean({those}, keepdim=True) * {x}", f"{x} - {x}.amax({those}, keepdim=True)", f"{x}.sum({those})",
        f"{x}.flip({those})", f"{x}.movedim({those}, [-1 - i for i in range(len({those}))])",
    )  # fmt: skip


@step(1)
def read_places(pen, x, t):
    """Masks and indices that are constants, or buffers."""
    if not t.dim():
        return None
    at = pen.int(-t.dim(), -1)
    n = t.shape[at]
    places = pen.buffer(f"torch.tensor({[pen.int(0, n - 1) for _ in range(pen.int(1, 4))]})")
    pen.later.append(f"{places}.fill_({pen.int(0, n - 1)})")
    mask = pen.buffer(f"torch.tensor({[True, *(pen.chance() for _ in range(n - 1))]})")
    sizes = [pen.int(1, n)]
    sizes = pen.made(str([*sizes, n - sizes[0]]))
    first = ", ".join([":"] * (at % t.dim()) + [""])
    return pen.one(
        f"{x}.index_select({at}, {places})", f"{x}[{first}{places}]", f"{x}[{first}{mask}]",
        f"{x}.index_select({at}, {mask}.nonzero().flatten())", f"{x}[{first}torch.arange({n}) % 2 == 0]",
        f"torch.cat({x}.split({sizes}, {at})[::-1], {at})", f"sum({x}.select({at}, int(k)) for k in {places})",
        f"{x}.index_select({at}, torch.unique({places}))", f"{x}.repeat_interleave({mask}.long() + 1, {at})",
        f"{x}.select({at}, {places}.max().item())",
    )  # fmt: skip


@step(1)
@image
def read_windows(pen, x, t, n):
    k = number(pen, 1, 3)
    kernel = pen.made(f"[{', '.join(str(pen.int(1, 3)) for _ in range(n))}]")
    pen.later.append(f"{kernel}[0] = {pen.int(1, 3)}")
    return pen.one(
        f"F.max_pool{n}d({x}, {kernel}, {k})", f"F.avg_pool{n}d({x}, {k}, {kernel})",
        f"F.conv{n}d({x}, {pen.parameter((1, t.shape[1], *[3] * n))}, padding={k}, stride={kernel})",
        f"F.interpolate({x}, scale_factor={k}.__float__())",
        f"sum(F.avg_pool{n}d({x}, 2 * i + 1, 1, i) for i in range({k}))",
    )  # fmt: skip
