"""PyTorch's operator samples on tiles: python tools/operator_samples.py [--cases N] [--seed S] [--jobs J].

A case is an operator from PyTorch's own tests with sample arguments, which are tiled like images or replicated like
parameters. Outputs and gradients on virtual ranks must equal those of one process in float64, unless the operator is
refused. Failures are printed; the exit code is 1 if there are any.
"""

import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_LOGS", "-all")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch_runs import find_difference, run_distributed, run_serial, share_captures
from trials import create_parser, format_counts, run_cases

from neondist.errors import UserError
from neondist.torch.capture.capture import capture_module

GRIDS = {1: ((1, 1, 2), (1, 1, 3)), 2: ((1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 3, 2)), 3: ((1, 2, 1), (1, 2, 2))}
"""(replicas, rows, cols), by the number of spatial axes"""
SAMPLES, TOLERANCE = 2, 1e-9
WITHOUT_VALUES = ("empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided", "empty_permuted")


class SampledOperator(nn.Module):
    """Module that applies an operator to its inputs; the other tensors are parameters or buffers."""

    def __init__(self, function: Any, leaves: Sequence[Any], spec: Any, indices: Sequence[int], trained: bool) -> None:
        super().__init__()
        self.function, self.spec, self.indices, self.constants = function, spec, list(indices), []
        self.shapes = [tuple(leaves[i].shape) for i in indices]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and i not in indices:
                self.constants.append(i)
                if trained and leaf.dtype == torch.float64:
                    self.register_parameter(f"t{i}", nn.Parameter(leaf.clone()))
                else:
                    self.register_buffer(f"t{i}", leaf.clone())

    def forward(self, *images: torch.Tensor) -> Any:
        """Return the output of the operator."""
        leaves = list(self.leaves)
        for i, image, shape in zip(self.indices, images, self.shapes, strict=True):
            leaves[i] = image.reshape(shape)
        for i in self.constants:
            leaves[i] = getattr(self, f"t{i}")
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def as_image(shape: Sequence[int], spatial: int) -> tuple[int, ...] | None:
    """Return the shape of a tensor as an image, whose last dimensions are tiled."""
    missing = spatial + 2 - len(shape)
    return (*[1] * missing, *shape) if missing >= 0 else None


def iterate_samples(operator: Any, rng: random.Random) -> Iterator[tuple[SampledOperator, list[torch.Tensor], int]]:
    """Yield modules, their images, and the number of spatial axes."""
    torch.manual_seed(rng.randrange(2**31))
    inputs = list(operator.sample_inputs("cpu", torch.float64)) if torch.float64 in operator.dtypes else []
    for sample in rng.sample(inputs, min(len(inputs), SAMPLES)):
        leaves, spec = pytree.tree_flatten(([sample.input, *sample.args], dict(sample.kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        dtypes = (torch.float64, torch.int64, torch.bool)
        if any(t.layout != torch.strided or not t.numel() or t.dtype not in dtypes for t in tensors):
            continue
        floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        for indices in (floating[:1], floating):
            ranks = [n for n in (1, 2, 3) if indices and all(as_image(leaves[i].shape, n) for i in indices)]
            if ranks:
                spatial = rng.choice(ranks)
                images = [leaves[i].detach().clone().reshape(as_image(leaves[i].shape, spatial)) for i in indices]
                yield SampledOperator(operator.op, leaves, spec, indices, rng.random() < 0.5), images, spatial


def run_sample(module: SampledOperator, images: list[torch.Tensor], grid: tuple[int, int, int]) -> tuple[str, str]:
    """Return 'exact', 'refused', 'wrong' or 'useless', and the reason."""
    try:
        expected = run_serial(module, images)
        perturbed = run_serial(module, [image * (1 + 1e-13) for image in images], expected["gradients"])
        if not expected["outputs"] or not find_difference(perturbed, expected)[0] < TOLERANCE / 10:
            return "useless", "the operator is discontinuous"
    except Exception as error:
        return "useless", repr(error)
    try:
        with share_captures():
            results = run_distributed(module, images, expected["gradients"], grid, timeout=30.0, at_once=1)
        deviation, name = max(find_difference(result, expected) for result in results)
    except UserError as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    if deviation <= TOLERANCE:
        return "exact", ""
    program = capture_module(module, [(tuple(image.shape), image.dtype) for image in images])
    tags = [tag for node in program.graph.nodes for tag in getattr(node.target, "tags", ())]
    drawn = torch.Tag.nondeterministic_seeded in tags
    return "useless" if drawn else "wrong", f"{name} is off by {deviation:.1e}"


def run_samples(seed: int, number: int) -> list[tuple[str, str, str]]:
    """Return the name of an operator, the outcome of each sample, and text to print."""
    warnings.simplefilter("ignore")
    operator = op_db[number % len(op_db)]
    name, rng, results = f"{operator.name} {operator.variant_test_name}".strip(), random.Random(f"{seed} {number}"), []
    if operator.name in WITHOUT_VALUES:
        return []
    for module, images, spatial in iterate_samples(operator, rng):
        grid = rng.choice(GRIDS[spatial])
        kind, reason = run_sample(module, images, grid)
        results.append((name, kind, f"{name} of {module.shapes}, case {number}, {grid}: {reason}"))
    return results


def main() -> int:
    """Run all cases."""
    options = create_parser(__doc__)
    options.set_defaults(cases=len(op_db))
    arguments = options.parse_args()
    results, refused = Counter(), Counter()
    for outcomes_of_case in run_cases(run_samples, arguments):
        for name, kind, text in outcomes_of_case:
            results[kind] += 1
            refused[name] += kind == "refused"
            if kind == "wrong":
                print(text, flush=True)
    print(f"seed {arguments.seed}, {arguments.cases} operators: {format_counts(results)}")
    print("refused:", format_counts(+refused))
    return int(results["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
