"""Modules without spatial axes: replicas divide the batch, and all ranks of a replica hold its samples."""

import pytest
import torch
from case_selection import select_grids
from torch import nn

import neondist as nd
import neondist.torch as ndt

GRIDS = [(2, 1, 1), (1, 2, 1), (2, 1, 2)]


class SequenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.encoder(self.table(x)).mean(1))


class RecurrentNet(nn.Module):
    """Loop over recurrent cells, which PyTorch decomposes into in-place operators."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.GRUCell(5, 6), nn.LSTMCell(6, 3), nn.Linear(3, 4)

    def forward(self, x):
        h, state = x.new_zeros(x.shape[0], 6), None
        for step in x.unbind(1):
            h = self.first(step, h)
            state = self.second(h, state)
        return self.last(state[0])


def build_perceptron():
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4))


CASES = {
    "vectors": (build_perceptron, torch.randn(7, 5, dtype=torch.float64)),
    "token ids": (SequenceClassifier, torch.randint(11, (7, 4))),
    "sequences": (RecurrentNet, torch.randn(7, 4, 5, dtype=torch.float64)),
}


pytestmark = pytest.mark.usefixtures("shared_captures")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_losses_and_gradients_match_single_process(case):
    make_module, x = CASES[case]
    labels = torch.arange(7) % 4

    def build():
        torch.manual_seed(3)
        return make_module().double()

    def body(world, shape):
        module = build()
        model = ndt.distribute(module, x.shape, nd.ProcessGrid(world, *shape), dtype=x.dtype, spatial=0)
        y = model(model.scatter(x))
        loss = model.loss(nn.CrossEntropyLoss(), y, model.scatter_target(labels))
        loss.backward()
        buffers = [buffer.double() for buffer in module.buffers()]
        return [model.gather(y), loss.detach(), *(p.grad for p in module.parameters()), *buffers]

    serial = build()
    y = serial(x)
    loss = nn.functional.cross_entropy(y, labels)
    loss.backward()
    expected = [
        y.detach(),
        loss.detach(),
        *(p.grad for p in serial.parameters()),
        *map(torch.Tensor.double, serial.buffers()),
    ]
    for shape in select_grids(GRIDS):
        for actual in nd.loopback.run(shape[0] * shape[1] * shape[2], lambda world, shape=shape: body(world, shape)):
            for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
                torch.testing.assert_close(actual_tensor, expected_tensor, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("shape", "spatial"), [((2, 3, 4, 5), 1), ((2, 3, 4, 5, 6), 0), ((2, 3), 2), ((2, 3, 4), -1)])
def test_wrong_numbers_of_spatial_axes_are_rejected(shape, spatial):
    with pytest.raises(nd.ConfigError, match="spatial"):
        ndt.distribute(nn.Identity(), shape, nd.ProcessGrid.serial(), spatial=spatial)
