"""Modules without spatial axes: replicas share the batch, and the ranks of a replica hold its samples."""

import pytest
import torch
from torch import nn
from torch_runs import captured_once, in_turn

import neondist as nd
import neondist.torch as ndt

GRIDS = [(2, 1, 1), (1, 2, 1), (2, 1, 2)]


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.encoder(self.table(x)).mean(1))


class Recurrent(nn.Module):
    """Cells, whose operators PyTorch composes of others in place, in a loop."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.GRUCell(5, 6), nn.LSTMCell(6, 3), nn.Linear(3, 4)

    def forward(self, x):
        h, state = x.new_zeros(x.shape[0], 6), None
        for step in x.unbind(1):
            h = self.first(step, h)
            state = self.second(h, state)
        return self.last(state[0])


def vectors():
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4))


CASES = {
    "vectors": (vectors, torch.randn(7, 5, dtype=torch.float64)),
    "token numbers": (Sequences, torch.randint(11, (7, 4))),
    "sequences": (Recurrent, torch.randn(7, 4, 5, dtype=torch.float64)),
}


@pytest.fixture(autouse=True)
def once():
    with captured_once():
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_losses_and_gradients_are_those_of_one_process(case):
    make, x = CASES[case]
    labels = torch.arange(7) % 4

    def made():
        torch.manual_seed(3)
        return make().double()

    def body(world, shape):
        module = made()
        model = ndt.distribute(module, x.shape, nd.ProcessGrid(world, *shape), dtype=x.dtype, spatial=0)
        y = model(model.scatter(x))
        loss = model.loss(nn.CrossEntropyLoss(), y, model.scatter_target(labels))
        loss.backward()
        buffers = [buffer.double() for buffer in module.buffers()]
        return [model.gather(y), loss.detach(), *(p.grad for p in module.parameters()), *buffers]

    alone = made()
    y = alone(x)
    loss = nn.functional.cross_entropy(y, labels)
    loss.backward()
    expected = [
        y.detach(),
        loss.detach(),
        *(p.grad for p in alone.parameters()),
        *map(torch.Tensor.double, alone.buffers()),
    ]
    for shape in in_turn(GRIDS):
        for found in nd.loopback.run(shape[0] * shape[1] * shape[2], lambda world, shape=shape: body(world, shape)):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("shape", "spatial"), [((2, 3, 4, 5), 1), ((2, 3, 4, 5, 6), 0), ((2, 3), 2), ((2, 3, 4), -1)])
def test_other_numbers_of_spatial_axes_are_refused(shape, spatial):
    with pytest.raises(nd.ConfigError, match="spatial"):
        ndt.distribute(nn.Identity(), shape, nd.ProcessGrid.serial(), spatial=spatial)
