"""Random small PyTorch modules, generated as programs from a seed and run on grids of virtual ranks.

case = draw_module(seed, number)
print(case.program())
run_on_grids(case)              # 'exact', 'refused: ...' or 'wrong: ...' for each grid
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from channel_regions import partition_by_channels
from module_steps import STEPS
from torch import nn
from torch.overrides import TorchFunctionMode
from torch_runs import find_difference, run_distributed, run_serial, run_uncompiled, share_captures

from neondist.errors import UserError
from neondist.torch.capture import capture
from neondist.torch.ir import layout
from neondist.torch.kernels import convolution, volumes, winograd

GRIDS = {
    1: ((1, 1, 1, 2), (1, 1, 1, 3), (2, 1, 1, 2), (1, 1, 1, 5), (3, 1, 1, 1)),
    2: ((1, 1, 2, 1), (1, 1, 1, 3), (1, 1, 2, 2), (2, 1, 1, 2), (1, 1, 5, 1), (3, 1, 2, 1), (1, 1, 2, 3)),
    3: ((1, 2, 1, 1), (1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 3, 1, 2), (1, 1, 1, 4)),
}
"""(replicas, planes, rows, cols) by the number of spatial axes, in addition to (1, 1, 1, 1)"""
EXTENTS = {1: 20, 2: 12, 3: 6}
OPTIONS = (
    {}, {"scheme": "deep_halo"}, {"scheme": "deep_halo(layers=4)"}, {"scheme": "deep_halo(layers=9)"}, {"strips": 1},
    {"strips": 3, "scheme": "deep_halo(layers=3)"}, {"recompute": True, "scheme": "deep_halo(layers=3)"},
    {"scheme": "overlap_tile(statistics=global)"}, {"memory": "least"}, {"scheme": "auto(latency=1.0, bandwidth=1e12)"},
    {"memory": "least", "strips": 2, "scheme": "deep_halo(layers=2)", "compile": run_uncompiled},
    {"memory": "least", "recompute": True, "compile": run_uncompiled},
    {"recompute": True, "strips": "auto", "compile": run_uncompiled},
)  # fmt: skip
TOLERANCE = 1e-9


@dataclass(frozen=True)
class RandomModule:
    """Module as a program.

    Attributes
    ----------
    shapes : of the inputs x0, x1, ...
    setup : statements of `__init__`
    steps : statements of `forward`, each of which defines one tensor
    returns : expression
    training : bool
    changes : statements that modify values read by `forward`, between two passes
    """

    shapes: tuple[tuple[int, ...], ...]
    setup: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    returns: str = "x0"
    training: bool = True
    changes: tuple[str, ...] = ()
    label: str = field(default="", compare=False)

    def program(self) -> str:
        """Return the source of the module."""
        arguments = ", ".join(f"x{index}" for index in range(len(self.shapes)))
        lines = ["class Module(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.setup]
        lines += ["", f"    def forward(self, {arguments}):", *(f"        {line}" for line in self.steps)]
        lines += [f"        return {self.returns}", ""]
        if self.changes:
            lines += ["    def change(self):", *(f"        {line}" for line in self.changes), ""]
        return "\n".join(lines)

    def module(self) -> nn.Module:
        """Return the module in float64, identical at every call; sometimes with frozen parameters."""
        names = {"nn": nn, "torch": torch, "F": F, "SimpleNamespace": SimpleNamespace}
        exec(self.program(), names)
        torch.manual_seed(7)
        module = names["Module"]().double()
        with torch.no_grad():
            for parameter in module.parameters():  # biases of 0 and weights of 1 hide mistakes
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64), alpha=0.1)
        if random.Random(f"frozen {self.label}").random() < 0.3:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(random.Random(f"frozen {self.label} {name}").random() < 0.5)
        return module.train(self.training)

    def inputs(self) -> list[torch.Tensor]:
        """Return random inputs, identical at every call."""
        torch.manual_seed(11)
        return [torch.randn(shape, dtype=torch.float64) for shape in self.shapes]

    @property
    def spatial(self) -> int:
        """Number of spatial axes."""
        return len(self.shapes[0]) - 2

    def grids(self) -> tuple:
        """Return the grids of this case."""
        rng = random.Random(repr(self.shapes) + self.label)
        return tuple(rng.sample(GRIDS[self.spatial], 2)) + (((1, 1, 1, 1),) if rng.random() < 0.1 else ())

    def options(self) -> dict:
        """Return options of `distribute`: mostly none, otherwise segments, strips or recomputation."""
        return random.Random(f"options {self.label}").choices(OPTIONS, [len(OPTIONS), *[1] * (len(OPTIONS) - 1)])[0]

    def share_by_channels(self) -> float:
        """Return the share of nodes that are partitioned by channels: mostly none."""
        return random.Random(f"channels {self.label}").choice([0.0, 0.0, 0.7, 1.0])

    @contextmanager
    def lower_kernel_thresholds(self) -> Iterator[None]:
        """Return a context in which half of the modules use the kernels for large tensors."""
        with pytest.MonkeyPatch.context() as patch:
            if random.Random(f"kernels {self.label}").random() < 0.5:
                patch.setattr(convolution, "_MIN_OUTPUTS", 1)
                for name, least in (("_MIN_CHANNELS", 1), ("_MIN_TILES", 1), ("_MAX_COVERED_PER_OUTPUT", 100)):
                    patch.setattr(winograd, name, least)
                for name in ("_MIN_OUTPUTS", "_MIN_TRANSPOSED_INPUTS"):
                    patch.setattr(volumes, name, 1)
            yield


class ModuleGenerator:
    """Generator of a module: random choices of steps, and the source so far."""

    def __init__(self, rng: random.Random, spatial: int) -> None:
        self.rng, self.spatial = rng, spatial
        self.setup: list[str] = []
        self.changes: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def int(self, low: int, high: int) -> int:
        """Return a random integer in [low, high]."""
        return self.rng.randint(low, high)

    def pick(self, *choices: object) -> object:
        """Return a random argument."""
        return self.rng.choice(choices)

    def chance(self, share: float = 0.5) -> bool:
        """Return True with a probability of `share`."""
        return self.rng.random() < share

    def bind(self, expression: str) -> str:
        """Assign an expression to an attribute of the module and return its name."""
        name = f"self.m{len(self.setup)}"
        self.setup.append(f"{name} = {expression}")
        return name

    def parameter(self, shape: object) -> str:
        """Add a parameter, sometimes a buffer or a frozen parameter, and return its name."""
        value, kind = f"torch.randn({tuple(shape)})", self.int(0, 9)
        if kind == 0:
            return self.bind(f"nn.Parameter({value}, requires_grad=False)")
        if kind < 3:
            return self.buffer(f"{value}.double()")
        return self.bind(f"nn.Parameter({value})")

    def buffer(self, expression: str) -> str:
        """Register a buffer and return its name."""
        name = f"m{len(self.setup)}"
        self.setup.append(f"self.register_buffer('{name}', {expression})")
        return f"self.{name}"

    def truncate(self, setup: int, changes: int) -> None:
        """Drop attributes and changes beyond these counts."""
        del self.setup[setup:], self.changes[changes:]

    def like(self, t: torch.Tensor) -> str | None:
        """Return the name of another tensor of the same shape, or None."""
        names = [name for name, other in self.tensors.items() if other.shape == t.shape and other is not t]
        return self.rng.choice(names) if names else None


class ContiguousNormGradients(TorchFunctionMode):
    """Mode with contiguous gradients of norms: PyTorch's gradients of a single sample are wrong for other layouts."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Make the output gradient of a norm contiguous."""
        result = func(*args, **kwargs or {})
        if func in (F.batch_norm, F.instance_norm) and result.requires_grad:
            result.register_hook(torch.Tensor.contiguous)
        return result


class UnusableModule(Exception):
    """Module that fails in one process or is numerically unstable."""


def draw_module(seed: int, number: int) -> RandomModule:
    """Return a random module that runs in one process."""
    for retry in range(100):
        rng = random.Random(f"{seed} {number} {retry}")
        try:
            case = _draw(rng, f"{seed} {number}")
            compute_reference(case, changed=False)
        except UnusableModule:
            continue
        try:
            if case.changes:
                compute_reference(case)
        except UnusableModule:
            return replace(case, changes=())
        return case
    raise AssertionError("no usable module")


def _draw(rng: random.Random, label: str) -> RandomModule:
    spatial = rng.choice([1, 2, 2, 2, 2, 3])
    cells = tuple(rng.randint(*((1, 3) if rng.random() < 0.15 else (4, EXTENTS[spatial]))) for _ in range(spatial))
    if rng.random() < 0.3:
        cells = tuple(8 if spatial < 3 else 4 for _ in cells)
    first = (rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 3, 4, 4, 6, 8]), *cells)
    shapes = [first]
    if rng.random() < 0.15:
        shapes.append(rng.choice([first, (first[0], first[1]), (first[0], 5), (first[0], 1, *cells)]))
    gen = ModuleGenerator(rng, spatial)
    training = rng.random() < 0.7
    case = RandomModule(tuple(shapes), training=training, label=label)
    gen.tensors.update({f"x{index}": t for index, t in enumerate(case.inputs())})
    steps: list[str] = []
    names = list(STEPS)
    weights = [STEPS[name][0] for name in names]
    for _ in range(rng.randint(2, 7)):
        for _ in range(30):
            name = rng.choice(list(gen.tensors)) if rng.random() < 0.3 else list(gen.tensors)[-1]
            step, sizes = STEPS[rng.choices(names, weights)[0]][1], (len(gen.setup), len(gen.changes))
            expression = step(gen, name, gen.tensors[name])
            if expression is None:
                gen.truncate(*sizes)
                continue
            target = f"y{len(steps)}"
            line = expression.replace("$", target) if "$" in expression else f"{target} = {expression}"
            value = _evaluate_step(case, gen, line, target)
            if value is None:
                gen.truncate(*sizes)
                continue
            steps.append(line)
            gen.tensors[target] = value
            break
    last = list(gen.tensors)[-1]
    other = rng.choice(list(gen.tensors))
    returns = rng.choices([last, f"{last}, {other}", f"{{'a': {last}, 'b': {other}}}", f"{last}.mean()"], [6, 1, 1, 1])[
        0
    ]
    changes = tuple(line for line in gen.changes if rng.random() < 0.7)
    return _prune(replace(case, setup=tuple(gen.setup), steps=tuple(steps), returns=returns, changes=changes))


def _evaluate_step(case: RandomModule, gen: ModuleGenerator, line: str, target: str) -> torch.Tensor | None:
    """Return the tensor that a statement defines, or None if it is unusable."""
    names = {"nn": nn, "torch": torch, "F": F, **{name: t.clone() for name, t in gen.tensors.items()}}
    trial = replace(case, setup=tuple(gen.setup), steps=(), returns="x0")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names["self"] = trial.module()
            exec(line, names)
    except Exception:
        return None
    value = names[target]
    usable = isinstance(value, torch.Tensor) and value.dtype == torch.float64 and 0 < value.numel() <= 6000
    if not usable or not value.isfinite().all() or value.dim() >= 7:
        return None
    # nonzero values this small are rounding errors, such as those of a norm of constants
    largest = value.abs().max()
    return value if largest == 0 or 1e-12 < largest < 1e4 else None


def compute_reference(case: RandomModule, changed: bool = True) -> dict:
    """Return the results of one process.

    Parameters
    ----------
    changed : bool
        Whether to run a second pass after the changes of the module, if any.

    Raises
    ------
    UnusableModule
        If the module fails, or if its results are sensitive to rounding errors of inputs and parameters.
    """
    module, perturbed, inputs = case.module(), case.module(), case.inputs()
    change = type(module).change if case.changes and changed else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with ContiguousNormGradients():
                result = run_serial(module, inputs, change=change)
            torch.manual_seed(13)
            with torch.no_grad():
                for parameter in perturbed.parameters():
                    parameter.mul_(1 + 1e-13 * torch.randn_like(parameter))
            with ContiguousNormGradients():
                perturbed_inputs = [x * (1 + 1e-13 * torch.randn_like(x)) for x in inputs]
                repeated = run_serial(perturbed, perturbed_inputs, result["gradients"], change)
        except Exception as error:
            raise UnusableModule(str(error)) from error
    for baseline, other in ((result, repeated), *([(result["after"], repeated["after"])] if change else [])):
        numbers = [*baseline["outputs"], *baseline["inputs"], *baseline["parameters"].values()]
        if not all(t.isfinite().all() for t in numbers if t is not None):
            raise UnusableModule("not finite")
        for gradients in (baseline["inputs"], baseline["parameters"].values()):
            if 0 < max((t.abs().max().item() for t in gradients if t is not None and t.numel()), default=0.0) < 1e-12:
                raise UnusableModule("only rounding errors, such as those of a norm of constants")
        if find_difference(other, baseline)[0] > TOLERANCE / 10:
            raise UnusableModule("chaotic")
    return result


def run_on_grids(case: RandomModule, grids: tuple | None = None) -> list[tuple[tuple, str]]:
    """Return the outcome on each grid: 'exact', 'refused: REASON' or 'wrong: REASON'."""
    expected = compute_reference(case)
    with share_captures(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(grid, _run(case, grid, expected)) for grid in grids or case.grids()]


def _run(case: RandomModule, grid: tuple, expected: dict) -> str:
    replicas, planes, rows, cols = grid
    module, after = case.module(), expected.get("after")
    try:
        with partition_by_channels(case.share_by_channels(), case.label), case.lower_kernel_thresholds():
            results = run_distributed(
                module, case.inputs(), expected["gradients"], (replicas, rows, cols), planes=planes, timeout=30.0,
                change=(type(module).change, after["gradients"]) if after else None, cells=True,
                inference=random.Random(f"inference {case.label}").random() < 0.2, **case.options(),
            )  # fmt: skip
    except UserError as error:
        return _check_refusal(case, grid, error)
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    for rank, result in enumerate(results):
        for phase, numbers in (("", result), (" after the change", result.get("after"))):
            deviation, name = (
                find_difference(numbers, expected["after"] if phase else expected) if numbers else (0.0, "")
            )
            if not deviation <= TOLERANCE:
                return f"wrong: rank {rank}: {name} is off by {deviation:.1e}{phase}"
        if result.get("idle"):
            return f"wrong: rank {rank} receives unused cells: {result['idle'][0]}"
    return "exact"


def _check_refusal(case: RandomModule, grid: tuple, error: UserError) -> str:
    """Return 'refused: REASON' if all ranks refuse a module, else 'wrong: REASON'."""
    # segments are planned identically on all ranks, as is the memory, which a changed module may exceed
    if "exchanges nothing, but" in str(error) or "give memory: " in str(error):
        return f"refused: {error}"
    replicas, planes, rows, cols = grid
    parts = {1: (planes * rows * cols,), 2: (planes * rows, cols), 3: (planes, rows, cols)}[case.spatial]
    mesh = layout.Mesh((replicas, *parts))
    try:
        program = capture.capture_module(case.module(), [(shape, torch.float64) for shape in case.shapes])
    except UserError as refusal:
        return f"refused: {refusal}"
    layouts = [layout.default_layout(shape, mesh) for shape in case.shapes]
    for rank in range(mesh.size):
        try:
            capture.lower_program(program, mesh, rank, layouts)
        except UserError:
            continue
        return f"wrong: rank {rank} does not refuse it, others do: {error}"
    return f"refused: {error}"


def shrink(case: RandomModule, grid: tuple) -> RandomModule:
    """Return a module with fewer steps that also fails."""

    def fails(case: RandomModule) -> bool:
        try:
            return run_on_grids(case, (grid,))[0][1].startswith("wrong")
        except UnusableModule:
            return False

    return _minimise(case, fails)


def _minimise(case: RandomModule, fails: Callable[[RandomModule], bool]) -> RandomModule:
    changed = True
    while changed:
        changed = False
        for smaller in _generate_smaller(case):
            if fails(smaller):
                case, changed = smaller, True
                break
    smaller = _prune(case)
    return smaller if fails(smaller) else case


def _prune(case: RandomModule) -> RandomModule:
    """Remove attributes that are not used."""
    used = set(re.findall(r"self\.m\d+", " ".join(case.steps)))
    needed = [tuple(line for line in lines if _attribute_name(line) in used) for lines in (case.setup, case.changes)]
    return replace(case, setup=needed[0], changes=needed[1])


def _attribute_name(line: str) -> str:
    return "self." + line.split("'")[1] if "register_buffer" in line else re.match(r"self\.m\d+", line)[0]


def _generate_smaller(case: RandomModule):
    if not case.returns.isidentifier():
        yield from (replace(case, returns=f"y{index}") for index in range(len(case.steps)))
    for index in range(len(case.changes)):
        yield replace(case, changes=case.changes[:index] + case.changes[index + 1 :])
    for index in reversed(range(len(case.steps))):
        target, _, expression = case.steps[index].partition(" = ")
        if re.fullmatch(r"[xy]\d+", expression):
            continue
        for name in [f"x{k}" for k in range(len(case.shapes))] + [f"y{k}" for k in range(index)]:
            yield replace(case, steps=(*case.steps[:index], f"{target} = {name}", *case.steps[index + 1 :]))
