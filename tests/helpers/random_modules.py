"""Random small PyTorch modules: drawn from a seed as programs, and tried on grids of virtual ranks.

drawn = draw(seed, number)
print(drawn.program())
attempt(drawn)                  # 'exact', 'refused: ...' or 'wrong: ...' for each grid
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from module_steps import STEPS
from torch import nn
from torch.overrides import TorchFunctionMode
from torch_runs import captured_once, difference, distributed, serial

from neondist.errors import UserError
from neondist.torch.capture import capture
from neondist.torch.ir import layout

GRIDS = {
    1: ((1, 1, 1, 2), (1, 1, 1, 3), (2, 1, 1, 2), (1, 1, 1, 5), (3, 1, 1, 1)),
    2: ((1, 1, 2, 1), (1, 1, 1, 3), (1, 1, 2, 2), (2, 1, 1, 2), (1, 1, 5, 1), (3, 1, 2, 1), (1, 1, 2, 3)),
    3: ((1, 2, 1, 1), (1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 3, 1, 2), (1, 1, 1, 4)),
}
"""(replicas, planes, rows, cols), by the number of spatial axes; (1, 1, 1, 1) besides."""
EXTENTS = {1: 20, 2: 12, 3: 6}
OPTIONS = (
    {}, {"scheme": "deep_halo"}, {"scheme": "deep_halo(layers=4)"}, {"scheme": "deep_halo(layers=9)"}, {"strips": 1},
    {"strips": 3, "scheme": "deep_halo(layers=3)"}, {"recompute": True, "scheme": "deep_halo(layers=3)"},
    {"scheme": "overlap_tile(statistics=global)"},
)  # fmt: skip
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Drawn:
    """A module as a program.

    Attributes
    ----------
    shapes : of the inputs x0, x1, ...
    setup : statements of `__init__`
    steps : statements of `forward`, each of which makes one tensor
    returns : expression
    training : bool
    changes : statements that change what `forward` reads, after a first pass
    """

    shapes: tuple[tuple[int, ...], ...]
    setup: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    returns: str = "x0"
    training: bool = True
    changes: tuple[str, ...] = ()
    label: str = field(default="", compare=False)

    def program(self) -> str:
        """Return the program of the module."""
        given = ", ".join(f"x{at}" for at in range(len(self.shapes)))
        lines = ["class Module(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.setup]
        lines += ["", f"    def forward(self, {given}):", *(f"        {line}" for line in self.steps)]
        lines += [f"        return {self.returns}", ""]
        if self.changes:
            lines += ["    def change(self):", *(f"        {line}" for line in self.changes), ""]
        return "\n".join(lines)

    def module(self) -> nn.Module:
        """Return the module, in float64, the same at every call."""
        names = {"nn": nn, "torch": torch, "F": F, "SimpleNamespace": SimpleNamespace}
        exec(self.program(), names)
        torch.manual_seed(7)
        module = names["Module"]().double()
        with torch.no_grad():
            for parameter in module.parameters():  # biases of 0 and weights of 1 hide mistakes
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64), alpha=0.1)
        return module.train(self.training)

    def inputs(self) -> list[torch.Tensor]:
        """Return inputs."""
        torch.manual_seed(11)
        return [torch.randn(shape, dtype=torch.float64) for shape in self.shapes]

    @property
    def spatial(self) -> int:
        """Number of spatial axes."""
        return len(self.shapes[0]) - 2

    def grids(self) -> tuple:
        """Return the grids to try it on."""
        rng = random.Random(repr(self.shapes) + self.label)
        return tuple(rng.sample(GRIDS[self.spatial], 2)) + (((1, 1, 1, 1),) if rng.random() < 0.1 else ())

    def options(self) -> dict:
        """Return how it is distributed: windows one by one, as most are, in segments, or in strips."""
        return random.Random(f"options {self.label}").choices(OPTIONS, [len(OPTIONS), *[1] * (len(OPTIONS) - 1)])[0]


class Pen:
    """Random numbers for steps, and the module that is being written."""

    def __init__(self, rng: random.Random, spatial: int) -> None:
        self.rng, self.spatial = rng, spatial
        self.setup: list[str] = []
        self.later: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def int(self, low: int, high: int) -> int:
        """Return one of [low, high]."""
        return self.rng.randint(low, high)

    def one(self, *of: object) -> object:
        """Return one of the arguments."""
        return self.rng.choice(of)

    def chance(self, share: float = 0.5) -> bool:
        """Return True so often."""
        return self.rng.random() < share

    def made(self, expression: str) -> str:
        """Return the name of an attribute of the module that is that."""
        name = f"self.m{len(self.setup)}"
        self.setup.append(f"{name} = {expression}")
        return name

    def parameter(self, shape: object) -> str:
        """Return the name of a parameter, or sometimes of a buffer, or of a parameter that is not trained."""
        value, kind = f"torch.randn({tuple(shape)})", self.int(0, 9)
        if kind == 0:
            return self.made(f"nn.Parameter({value}, requires_grad=False)")
        if kind < 3:
            return self.buffer(f"{value}.double()")
        return self.made(f"nn.Parameter({value})")

    def buffer(self, expression: str) -> str:
        """Return the name of a buffer that is that."""
        name = f"m{len(self.setup)}"
        self.setup.append(f"self.register_buffer('{name}', {expression})")
        return f"self.{name}"

    def forget(self, setup: int, later: int) -> None:
        """Drop what has been made beyond so many attributes, and changes of them."""
        del self.setup[setup:], self.later[later:]

    def like(self, t: torch.Tensor) -> str | None:
        """Return the name of another tensor of that shape."""
        names = [name for name, other in self.tensors.items() if other.shape == t.shape and other is not t]
        return self.rng.choice(names) if names else None


class ContiguousNormGradients(TorchFunctionMode):
    """PyTorch's gradients of norms of one sample, which are wrong if those of their results lie otherwise in memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Let gradients that come to a norm be contiguous."""
        found = func(*args, **kwargs or {})
        if func in (F.batch_norm, F.instance_norm) and found.requires_grad:
            found.register_hook(torch.Tensor.contiguous)
        return found


class Useless(Exception):
    """A module that says nothing: it fails, or its numbers hang by a hair."""


def draw(seed: int, number: int) -> Drawn:
    """Return a random module, which works in one process."""
    for again in range(100):
        rng = random.Random(f"{seed} {number} {again}")
        try:
            found = _drawn(rng, f"{seed} {number}")
            reference(found, changed=False)
        except Useless:
            continue
        try:
            if found.changes:
                reference(found)
        except Useless:
            return replace(found, changes=())
        return found
    raise AssertionError("no module that works")


def _drawn(rng: random.Random, label: str) -> Drawn:
    spatial = rng.choice([1, 2, 2, 2, 2, 3])
    cells = tuple(rng.randint(*((1, 3) if rng.random() < 0.15 else (4, EXTENTS[spatial]))) for _ in range(spatial))
    if rng.random() < 0.3:
        cells = tuple(8 if spatial < 3 else 4 for _ in cells)
    first = (rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 3, 4, 4, 6, 8]), *cells)
    shapes = [first]
    if rng.random() < 0.15:
        shapes.append(rng.choice([first, (first[0], first[1]), (first[0], 5), (first[0], 1, *cells)]))
    pen = Pen(rng, spatial)
    training = rng.random() < 0.7
    drawn = Drawn(tuple(shapes), training=training, label=label)
    pen.tensors.update({f"x{at}": t for at, t in enumerate(drawn.inputs())})
    steps: list[str] = []
    names = list(STEPS)
    weights = [STEPS[name][0] for name in names]
    for _ in range(rng.randint(2, 7)):
        for _ in range(30):
            name = rng.choice(list(pen.tensors)) if rng.random() < 0.3 else list(pen.tensors)[-1]
            step, kept = STEPS[rng.choices(names, weights)[0]][1], (len(pen.setup), len(pen.later))
            text = step(pen, name, pen.tensors[name])
            if text is None:
                pen.forget(*kept)
                continue
            target = f"y{len(steps)}"
            line = text.replace("$", target) if "$" in text else f"{target} = {text}"
            found = _tried(drawn, pen, line, target)
            if found is None:
                pen.forget(*kept)
                continue
            steps.append(line)
            pen.tensors[target] = found
            break
    last = list(pen.tensors)[-1]
    other = rng.choice(list(pen.tensors))
    returns = rng.choices([last, f"{last}, {other}", f"{{'a': {last}, 'b': {other}}}", f"{last}.mean()"], [6, 1, 1, 1])[
        0
    ]
    changes = tuple(line for line in pen.later if rng.random() < 0.7)
    return _tidy(replace(drawn, setup=tuple(pen.setup), steps=tuple(steps), returns=returns, changes=changes))


def _tried(drawn: Drawn, pen: Pen, line: str, target: str) -> torch.Tensor | None:
    """Return what a statement gives, or None if it is of no use."""
    names = {"nn": nn, "torch": torch, "F": F, **{name: t.clone() for name, t in pen.tensors.items()}}
    one = replace(drawn, setup=tuple(pen.setup), steps=(), returns="x0")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names["self"] = one.module()
            exec(line, names)
    except Exception:
        return None
    found = names[target]
    good = isinstance(found, torch.Tensor) and found.dtype == torch.float64 and 0 < found.numel() <= 6000
    return found if good and found.isfinite().all() and found.abs().max() < 1e4 and found.dim() < 7 else None


def reference(drawn: Drawn, changed: bool = True) -> dict:
    """Return what one process finds.

    Parameters
    ----------
    changed : bool
        Whether a second pass follows on the module's changes, if there are any.

    Raises
    ------
    Useless
        If it fails, or if its numbers jump when the inputs and parameters change by nothing.
    """
    module, near, inputs = drawn.module(), drawn.module(), drawn.inputs()
    change = type(module).change if drawn.changes and changed else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with ContiguousNormGradients():
                found = serial(module, inputs, change=change)
            torch.manual_seed(13)
            with torch.no_grad():
                for parameter in near.parameters():
                    parameter.mul_(1 + 1e-13 * torch.randn_like(parameter))
            with ContiguousNormGradients():
                moved = [x * (1 + 1e-13 * torch.randn_like(x)) for x in inputs]
                again = serial(near, moved, found["gradients"], change)
        except Exception as error:
            raise Useless(str(error)) from error
    for one, other in ((found, again), *([(found["after"], again["after"])] if change else [])):
        numbers = [*one["outputs"], *one["inputs"], *one["parameters"].values()]
        if not all(t.isfinite().all() for t in numbers if t is not None):
            raise Useless("not finite")
        if difference(other, one)[0] > TOLERANCE / 10:
            raise Useless("chaotic")
    return found


def attempt(drawn: Drawn, grids: tuple | None = None) -> list[tuple[tuple, str]]:
    """Return for each grid what comes of it there: 'exact', 'refused: WHY' or 'wrong: WHAT'."""
    expected = reference(drawn)
    with captured_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(grid, _outcome(drawn, grid, expected)) for grid in grids or drawn.grids()]


def _outcome(drawn: Drawn, grid: tuple, expected: dict) -> str:
    replicas, planes, rows, cols = grid
    module, after = drawn.module(), expected.get("after")
    try:
        every = distributed(
            module, drawn.inputs(), expected["gradients"], (replicas, rows, cols), planes=planes, timeout=30.0,
            change=(type(module).change, after["gradients"]) if after else None, cells=True,
            inference=random.Random(f"inference {drawn.label}").random() < 0.2, **drawn.options(),
        )  # fmt: skip
    except UserError as error:
        return _refused(drawn, grid, error)
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    for rank, found in enumerate(every):
        for when, numbers in (("", found), (" after the change", found.get("after"))):
            worst, where = difference(numbers, expected["after"] if when else expected) if numbers else (0.0, "")
            if not worst <= TOLERANCE:
                return f"wrong: rank {rank}: {where} is off by {worst:.1e}{when}"
        if found.get("idle"):
            return f"wrong: rank {rank} receives what it does not need: {found['idle'][0]}"
    return "exact"


def _refused(drawn: Drawn, grid: tuple, error: UserError) -> str:
    """Return that all ranks refuse a module, or what is wrong."""
    if "exchanges nothing, but" in str(error):  # on all ranks alike: segments are looked for on none in particular
        return f"refused: {error}"
    replicas, planes, rows, cols = grid
    parts = {1: (planes * rows * cols,), 2: (planes * rows, cols), 3: (planes, rows, cols)}[drawn.spatial]
    mesh = layout.Mesh((replicas, *parts))
    try:
        program = capture.capture_module(drawn.module(), [(shape, torch.float64) for shape in drawn.shapes])
    except UserError as cause:
        return f"refused: {cause}"
    layouts = [layout.cut(shape, mesh) for shape in drawn.shapes]
    for rank in range(mesh.size):
        try:
            capture.lower_program(program, mesh, rank, layouts)
        except UserError:
            continue
        return f"wrong: rank {rank} does not refuse it, others do: {error}"
    return f"refused: {error}"


def shrink(drawn: Drawn, grid: tuple) -> Drawn:
    """Return a module of fewer steps that fails in the same way."""

    def fails(case: Drawn) -> bool:
        try:
            return attempt(case, (grid,))[0][1].startswith("wrong")
        except Useless:
            return False

    return _shrunk(drawn, fails)


def _shrunk(drawn: Drawn, fails: Callable[[Drawn], bool]) -> Drawn:
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(drawn):
            if fails(smaller):
                drawn, changed = smaller, True
                break
    smaller = _tidy(drawn)
    return smaller if fails(smaller) else drawn


def _tidy(drawn: Drawn) -> Drawn:
    """Return it without what is made and not used."""
    used = set(re.findall(r"self\.m\d+", " ".join(drawn.steps)))
    kept = [tuple(line for line in lines if _name(line) in used) for lines in (drawn.setup, drawn.changes)]
    return replace(drawn, setup=kept[0], changes=kept[1])


def _name(line: str) -> str:
    return "self." + line.split("'")[1] if "register_buffer" in line else re.match(r"self\.m\d+", line)[0]


def _smaller(drawn: Drawn):
    if not drawn.returns.isidentifier():
        yield from (replace(drawn, returns=f"y{at}") for at in range(len(drawn.steps)))
    for at in range(len(drawn.changes)):
        yield replace(drawn, changes=drawn.changes[:at] + drawn.changes[at + 1 :])
    for at in reversed(range(len(drawn.steps))):
        target, _, made = drawn.steps[at].partition(" = ")
        if re.fullmatch(r"[xy]\d+", made):
            continue
        for name in [f"x{k}" for k in range(len(drawn.shapes))] + [f"y{k}" for k in range(at)]:
            yield replace(drawn, steps=(*drawn.steps[:at], f"{target} = {name}", *drawn.steps[at + 1 :]))
