"""Unmodified public PyTorch models against a single process on every grid.

`make zoo` runs all models on all grids; the suite runs some, on one grid each.
"""

import copy
import os

import pytest

torch = pytest.importorskip("torch")

from case_selection import select_cases  # noqa: E402
from torch_runs import check_module, run_distributed, run_serial, share_captures  # noqa: E402
from zoo import ZOO  # noqa: E402
from zoo_reference import (  # noqa: E402
    build_deterministic,
    compute_loss,
    draw_example,
    draw_like,
    flatten_tensors,
    make_sgd,
    train_reference,
)

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402

ALL_MODELS = "NEONDIST_ZOO" in os.environ
# covers nearly all operators of the zoo; test_operators.py has grouped convolutions (mnasnet) and relu6
SUITE = (
    ("torchvision.shufflenet_v2_x0_5", "torchvision.squeezenet1_1", "timm.convnext_atto"),
    ("torchvision.swin", "diffusers.vae_encoder_with_attention", "diffusers.vae_decoder_with_attention"),
    ("smp.UnetPlusPlus", "smp.PSPNet", "monai.BasicUNet"),
    ("monai.DynUNet", "monai.SegResNet", "monai.AttentionUnet"),
)
"""the models of a line take turns"""
NAMES = [
    entry.name
    for entry in ZOO
    if ALL_MODELS or entry.name in [name for line in SUITE for name in select_cases(line, 3)]
]
GRIDS = ((1, 1, 1), (1, 2, 1), (1, 1, 3), (1, 2, 2), (1, 3, 2))
"""(replicas, rows, cols) of 1, 2, 3, 4, 6 ranks"""
TRAINED = ("torchvision.squeezenet1_1", "monai.UNet", "diffusers.vae_decoder_with_attention")


def find_entry(name):
    return next(entry for entry in ZOO if entry.name == name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long
def test_public_models_match_single_process(name):
    entry, index = find_entry(name), NAMES.index(name)
    module = build_deterministic(entry)
    grids = GRIDS if ALL_MODELS else (GRIDS[1 + index % 4],)
    if entry.example_shape[0] > 1 and (ALL_MODELS or index % 3 == 0):
        grids = (*grids, (2, 1, 1), (2, 1, 2)) if ALL_MODELS else ((2, 1, 2),)
    check_module(module, entry.example_shape, grids=grids, tolerance=1e-9)


@pytest.mark.parametrize("name", [name for name in TRAINED if ALL_MODELS or name != "monai.UNet"])
@pytest.mark.long
def test_training_steps_match_single_process(name):
    entry = find_entry(name)
    expected, original = train_reference(entry), build_deterministic(entry)

    def body(world):
        with ProcessGrid(world) as grid:
            module = copy.deepcopy(original)
            model = ndt.distribute(module, entry.example_shape, grid)
            optimizer = make_sgd(model)
            for step in range(5):
                optimizer.zero_grad()
                outputs = flatten_tensors(model(model.scatter(draw_example(entry, "float64", step))))
                outputs_like = [torch.empty(shape, dtype=torch.float64) for shape in model.output_shapes]
                targets = [model.scatter_target(t) for t in draw_like(outputs_like, step + 1)]
                model.loss(compute_loss, outputs, targets).backward()
                optimizer.step()
            return module.state_dict()

    with share_captures():
        for state in loopback.run(4, body):
            for key, values in expected.items():
                scale = values.double().abs().max().clamp(min=1e-3)
                assert ((state[key] - values).double().abs().max() / scale).item() <= 1e-8, key


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 3, 1)])
@pytest.mark.long
def test_image_decoder_in_single_precision(grid):
    """Largest absolute difference for latents of odd sizes; values are around 1."""
    entry = find_entry("diffusers.vae_decoder_with_attention")
    module, latents = build_deterministic(entry, "float32"), draw_example(entry, "float32")
    expected = run_serial(module, [latents])
    with share_captures():
        for actual in run_distributed(module, [latents], expected["gradients"], grid):
            assert (actual["outputs"][0] - expected["outputs"][0]).abs().max().item() <= 1e-5
