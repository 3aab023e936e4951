"""Public PyTorch models, unmodified: the numbers of one process on every grid.

`make zoo` runs all of them on all grids; the suite some, each on one.
"""

import copy
import os

import pytest

torch = pytest.importorskip("torch")

from torch_runs import captured_once, check, distributed, serial  # noqa: E402
from turns import some  # noqa: E402
from zoo import ZOO  # noqa: E402
from zoo_reference import deterministic, drawn_like, example, loss_of, sgd, state_after, tensors_of  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402

EVERY = "NEONDIST_ZOO" in os.environ
# whose operators are nearly all of the zoo's; test_operators.py has grouped convolutions (mnasnet) and relu6
SOME = (
    ("torchvision.shufflenet_v2_x0_5", "torchvision.squeezenet1_1", "timm.convnext_atto"),
    ("torchvision.swin", "diffusers.vae_encoder_with_attention", "diffusers.vae_decoder_with_attention"),
    ("smp.UnetPlusPlus", "smp.PSPNet", "monai.BasicUNet"),
    ("monai.DynUNet", "monai.SegResNet", "monai.AttentionUnet"),
)
"""those of a line take turns"""
NAMES = [entry.name for entry in ZOO if EVERY or entry.name in [name for line in SOME for name in some(line, 3)]]
GRIDS = ((1, 1, 1), (1, 2, 1), (1, 1, 3), (1, 2, 2), (1, 3, 2))
"""(replicas, rows, cols) of 1, 2, 3, 4, 6 ranks"""
TRAINED = ("torchvision.squeezenet1_1", "monai.UNet", "diffusers.vae_decoder_with_attention")


def entry_of(name):
    return next(entry for entry in ZOO if entry.name == name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long
def test_a_public_model_gives_the_numbers_of_one_process(name):
    entry, at = entry_of(name), NAMES.index(name)
    module = deterministic(entry)
    grids = GRIDS if EVERY else (GRIDS[1 + at % 4],)
    if entry.example_shape[0] > 1 and (EVERY or at % 3 == 0):
        grids = (*grids, (2, 1, 1), (2, 1, 2)) if EVERY else ((2, 1, 2),)
    check(module, entry.example_shape, grids=grids, tolerance=1e-9)


@pytest.mark.parametrize("name", [name for name in TRAINED if EVERY or name != "monai.UNet"])
@pytest.mark.long
def test_five_steps_of_an_optimiser(name):
    entry = entry_of(name)
    expected, build = state_after(entry), deterministic(entry)

    def body(world):
        with ProcessGrid(world) as grid:
            module = copy.deepcopy(build)
            model = ndt.distribute(module, entry.example_shape, grid)
            optimizer = sgd(model)
            for step in range(5):
                optimizer.zero_grad()
                outputs = tensors_of(model(model.scatter(example(entry, "float64", step))))
                whole = [torch.empty(shape, dtype=torch.float64) for shape in model.output_shapes]
                targets = [model.scatter_target(t) for t in drawn_like(whole, step + 1)]
                model.loss(loss_of, outputs, targets).backward()
                optimizer.step()
            return module.state_dict()

    with captured_once():
        for found in loopback.run(4, body):
            for key, values in expected.items():
                scale = values.double().abs().max().clamp(min=1e-3)
                assert ((found[key] - values).double().abs().max() / scale).item() <= 1e-8, key


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 3, 1)])
@pytest.mark.long
def test_a_decoder_of_images_in_single_precision(grid):
    """Latents of odd sizes; the largest difference anywhere, of values around 1."""
    entry = entry_of("diffusers.vae_decoder_with_attention")
    module, latents = deterministic(entry, "float32"), example(entry, "float32")
    expected = serial(module, [latents])
    with captured_once():
        for found in distributed(module, [latents], expected["gradients"], grid):
            assert (found["outputs"][0] - expected["outputs"][0]).abs().max().item() <= 1e-5
