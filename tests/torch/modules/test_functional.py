"""`ndt.halo` and `ndt.reduce`: results and adjoints against GlobalArray and a single process."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_training import draw_tensor  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402

GRIDS = (1, 1, 1), (1, 2, 2), (1, 3, 2), (2, 1, 3)
WINDOWS = {
    "3": nd.Window(3, padding=1),
    "even, strided": nd.Window((4, 3), stride=(2, 3), padding=((2, 1), (0, 2))),
    "dilated": nd.Window(3, padding=2, dilation=2, fill=1.5),
    "wide": nd.Window(9, padding=4),
    "reflect": nd.Window(5, padding=2, mode="reflect"),
    "replicate": nd.Window((3, 5), stride=2, padding=(1, 4), mode="replicate"),
    "wrap": nd.Window(5, padding=2, mode="wrap"),
    "none": nd.Window(1, padding=0),
    "by axis": nd.Window(4, padding=((3, 1), (2, 4)), mode=("zeros", "wrap")),
    "crop": nd.Window(1, padding=((-2, -1), (0, -3))),
    "valid": nd.Window(4, padding=0, stride=3),
}
IMAGE = (4, 2, 11, 9)


def run_on_grid(grid, body):
    replicas, rows, cols = grid

    def rank(world):
        with nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            return body(ranks)

    return loopback.run(replicas * rows * cols, rank, timeout=20.0)


def crop_to_tile(image, grid):
    lo, hi = grid.sample_range(len(image))
    return image[(slice(lo, hi), slice(None), *grid.tile_box(image.shape[2:]).slices)].clone()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.long
def test_halo_and_its_adjoint_match_global_array(name, grid):
    window, image = WINDOWS[name], draw_tensor(*IMAGE)

    def body(ranks):
        n, c, *extent = IMAGE
        array = nd.GlobalArray(ranks, (n, *extent, c), window, dtype="float64")
        x = crop_to_tile(image, ranks).requires_grad_()
        view = ndt.halo(x, window, ranks)
        expected = array.get_fprop_view(x.detach().movedim(1, -1).numpy())
        np.testing.assert_array_equal(view.detach().movedim(1, -1).numpy(), expected)
        gradient = draw_tensor(*view.shape, step=ranks.rank)
        view.backward(gradient)
        expected = array.get_bprop_view(gradient.movedim(1, -1).numpy())
        np.testing.assert_allclose(x.grad.movedim(1, -1).numpy(), expected, rtol=0, atol=1e-13)
        linear = view.detach() - ndt.halo(torch.zeros_like(x), window, ranks, global_shape=IMAGE).detach()
        products = np.array([(linear * gradient).sum().item(), (x * x.grad).sum().item()])
        ranks.world.allreduce(products)
        return products

    for forward, backward in run_on_grid(grid, body):
        assert abs(forward - backward) <= 1e-12 * max(1, abs(forward))


@pytest.mark.parametrize("shape", [(2, 3, 17), (1, 2, 5, 6, 7)], ids=["1-D", "3-D"])
def test_convolution_in_other_dimensions(shape):
    ndim = len(shape) - 2
    convolve = {1: F.conv1d, 3: F.conv3d}[ndim]
    image, weights = draw_tensor(*shape), draw_tensor(4, shape[1], *[3] * ndim, step=1)
    global_image = image.clone().requires_grad_()
    expected = convolve(global_image, weights, padding=1)
    expected.square().sum().backward()

    def body(world):
        with nd.ProcessGrid(world, planes=2 if ndim == 3 else 1) as grid:
            x = crop_to_tile(image, grid).requires_grad_()
            y = convolve(ndt.halo(x, nd.Window(3, padding=1, ndim=ndim), grid), weights)
            y.square().sum().backward()
            torch.testing.assert_close(y, crop_to_tile(expected.detach(), grid))
            torch.testing.assert_close(x.grad, crop_to_tile(global_image.grad, grid))

    loopback.run(4, body, timeout=20.0)


def test_training_step_matches_single_process():
    """A convolution, a normalisation with statistics of the image, and partial losses."""
    image, initial_weights = draw_tensor(*IMAGE), draw_tensor(3, 2, 3, 3, step=1)

    def run_single_process():
        x, weights = image.clone().requires_grad_(), initial_weights.clone().requires_grad_()
        y = F.conv2d(x, weights, padding=1)
        y = y - y.mean((2, 3), keepdim=True)
        loss = (y / y.abs().amax((2, 3), keepdim=True)).exp().mean()
        loss.backward()
        return loss.detach(), x.grad, weights.grad

    loss, dx, dweights = run_single_process()

    def body(grid):
        x, weights = crop_to_tile(image, grid).requires_grad_(), initial_weights.clone().requires_grad_()
        y = F.conv2d(ndt.halo(x, nd.Window(3, padding=1), grid), weights)
        cells = IMAGE[2] * IMAGE[3]
        y = y - ndt.reduce(y.sum((2, 3), keepdim=True), "sum", grid) / cells
        y = y / ndt.reduce(y.abs().amax((2, 3), keepdim=True), "max", grid)
        partial_loss = y.exp().sum() / (IMAGE[0] * 3 * cells)
        partial_loss.backward()
        torch.testing.assert_close(ndt.reduce(partial_loss.detach(), "sum", grid, group="world"), loss)
        torch.testing.assert_close(x.grad, crop_to_tile(dx, grid))
        torch.testing.assert_close(ndt.reduce(weights.grad, "sum", grid, group="world"), dweights)

    for grid in GRIDS[1:]:
        run_on_grid(grid, body)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_adjoint_of_reduce(op):
    def body(grid):
        x = draw_tensor(3, 4, step=grid.rank).requires_grad_()
        y = ndt.reduce(x, op, grid)
        gradient = draw_tensor(3, 4, step=10 + grid.rank)
        y.backward(gradient)
        products = np.array([(y * gradient).sum().item(), (x * x.grad).sum().item()])
        grid.world.allreduce(products)
        return products

    for forward, backward in run_on_grid((1, 2, 2), body):
        assert abs(forward - backward) <= 1e-12 * abs(forward)


def test_changing_image_sizes():
    window = nd.Window(3, padding=1)

    def body(grid):
        for extent in (5, 6, 5, 6):
            image = draw_tensor(1, 1, extent, 4)
            view = ndt.halo(crop_to_tile(image, grid), window, grid)
            padded = F.pad(image, (1, 1, 1, 1))
            lo, hi = nd.part_range(extent, 2, grid.row)
            torch.testing.assert_close(view, padded[:, :, lo : hi + 2])

    run_on_grid((1, 2, 1), body)


@pytest.mark.parametrize("window", [WINDOWS["even, strided"], WINDOWS["by axis"], WINDOWS["none"]])
@pytest.mark.long
def test_opcheck(window):
    with nd.ProcessGrid.serial() as grid:
        padding = sum(window.padding, ())
        arguments = (
            window.kernel,
            window.stride,
            padding,
            window.dilation,
            window.fill,
            ",".join(window.modes),
            IMAGE[2:],
        )
        operators = torch.ops.neondist
        torch.library.opcheck(operators.halo.default, (draw_tensor(*IMAGE).requires_grad_(), grid.handle, *arguments))
        for op in ("sum", "max"):
            torch.library.opcheck(
                operators.reduce.default, (draw_tensor(3, 4).requires_grad_(), op, grid.handle, "tiles")
            )


@pytest.mark.long
def test_training_step_compiles_to_one_graph():
    image, initial_weights, window = draw_tensor(*IMAGE), draw_tensor(3, 2, 3, 3, step=1), nd.Window(3, padding=1)

    def body(grid):
        def loss(x, weights):
            y = F.conv2d(ndt.halo(x, window, grid, IMAGE), weights)
            y = y - ndt.reduce(y.sum((2, 3), keepdim=True), "sum", grid) / (IMAGE[2] * IMAGE[3])
            return (y / ndt.reduce(y.abs().amax((2, 3), keepdim=True), "max", grid)).exp().sum()

        def compute_gradients(function):
            x, weights = crop_to_tile(image, grid).requires_grad_(), initial_weights.clone().requires_grad_()
            function(x, weights).backward()
            return x.grad, weights.grad

        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compute_gradients(compiled), compute_gradients(loss))

    run_on_grid((1, 2, 1), body)


def test_compilation_without_the_global_shape():
    def body(grid):
        view = torch.compile(lambda x: ndt.halo(x, nd.Window(3, padding=1), grid).sin(), backend="aot_eager")
        x = crop_to_tile(draw_tensor(*IMAGE), grid)
        torch.testing.assert_close(view(x), ndt.halo(x, nd.Window(3, padding=1), grid).sin())

    run_on_grid((1, 2, 1), body)


def test_checkpoint_preserves_message_order():
    """Messages keep their order even if only some ranks need saved tensors in backward."""
    image, window = draw_tensor(*IMAGE), nd.Window(3, padding=1)

    def body(grid):
        def function(x):
            sums = ndt.reduce(ndt.halo(x, window, grid)[:, :, 1:-1, 1:-1].sum((2, 3)), "sum", grid)
            return sums.sin() if grid.rank else sums * 2

        gradients = []
        for run in (function, lambda x: checkpoint(function, x, use_reentrant=False)):
            x = crop_to_tile(image, grid).requires_grad_()
            run(x).sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)

    run_on_grid((1, 2, 1), body)


def collect_messages(body):
    def rank(grid):
        try:
            body(grid)
        except nd.UserError as error:
            return str(error)
        return ""

    return run_on_grid((1, 2, 1), rank)


def test_bad_arguments():
    window, x = nd.Window(3, padding=1), torch.zeros(1, 1, 3, 3)
    cases = (
        (lambda grid: ndt.halo(x[:, :, grid.rank :], window, grid), ["", ""]),
        (lambda grid: ndt.halo(x[:, :, 1 - grid.rank :], window, grid), ["this rank's tile of (5, 3) is"] * 2),
        (lambda grid: ndt.halo(x[0], window, grid), ["a 4-D tensor (N, C, *spatial), got shape (1, 3, 3)"] * 2),
        (lambda grid: ndt.halo(x.numpy(), window, grid), ["x: expected a torch.Tensor, got ndarray"] * 2),
        (lambda grid: ndt.halo(x, 3, grid), ["window: expected an nd.Window, got 3"] * 2),
        (lambda grid: ndt.halo(x, window, grid, (1, 1, 7, 3)), ["this rank's tile of (7, 3) is"] * 2),
        (lambda grid: ndt.halo(x, nd.Window(20), grid), ["more than the padded input has"] * 2),
        (lambda grid: ndt.halo(x.double() if grid.rank else x, window, grid), ["the dtype of x is torch.float64"] * 2),
        (lambda grid: ndt.reduce(x, "mean", grid), ["op: 'mean' is unknown; choose 'sum' or 'max'"] * 2),
        (lambda grid: ndt.reduce(x[grid.rank :], "sum", grid), ["rank 1: the shape of x is (0, 1, 3, 3)"] * 2),
        (lambda grid: ndt.reduce(x, "sum", None), ["grid: expected a ProcessGrid, got None"] * 2),
    )  # fmt: skip
    for body, expected_messages in cases:
        for message, expected in zip(collect_messages(body), expected_messages, strict=True):
            assert expected in message, message
            assert bool(expected) == bool(message)
    grid = nd.ProcessGrid.serial()
    grid.close()
    with pytest.raises(nd.GridError, match="grid: already closed"):
        ndt.halo(x, window, grid)
