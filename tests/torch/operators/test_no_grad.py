"""Values without gradients, and writes that autograd does not see."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_module  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

IMAGES, GRIDS = (2, 3, 9, 7), ((1, 1, 2), (1, 3, 1), (2, 1, 2))


def centre_in_inference_mode(x):
    with torch.inference_mode():
        mean = x.mean((2, 3), keepdim=True)
    return x - mean.clone()


def switch_gradients(x):
    y = torch.zeros_like(x)
    for k in range(3):
        with torch.set_grad_enabled(k == 2):
            y = (x + y).tanh()
    return y


@pytest.mark.parametrize("function", [centre_in_inference_mode, switch_gradients])
def test_disabled_gradients(function):
    check_module(FunctionModule(lambda x, conv: function(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grids=GRIDS)


class RoundedConv(nn.Conv2d):
    """Convolution with a straight-through estimator and a running mean written with Tensor.data."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("running", torch.zeros(3))

    def forward(self, x):
        y = super().forward(x)
        self.running.data.mul_(0.9).add_(y.data.mean((0, 2, 3)))
        return y + (y.round() - y).data + nn.functional.conv2d(x, self.weight.data)


def test_tensor_data_is_detached():
    check_module(RoundedConv(3, 3, 3), IMAGES, grids=GRIDS)


def double_in_place(x):
    with torch.no_grad():
        x.mul_(2)
    return x * x


def fill_detached(x):
    x.detach()[:, :1].fill_(1)
    return x * x


@pytest.mark.parametrize("function", [double_in_place, fill_detached])
def test_writes_hidden_from_autograd_are_rejected(function):
    with pytest.raises(nd.UserError, match=r"\.py:\d+: .* so that gradients ignore the change"):
        check_module(FunctionModule(lambda x, conv: function(conv(x)), nn.Conv2d(3, 3, 3)), IMAGES, grids=[(1, 1, 2)])


class WrittenConv(nn.Conv2d):
    """Convolution with a vector, both parameters, that `write` changes in the forward pass."""

    def __init__(self, write, trained=False):
        super().__init__(3, 3, 3)
        self.write, self.vector = write, nn.Parameter(torch.tensor([0.5, -1.0, 2.0]), requires_grad=trained)

    def forward(self, x):
        self.write(self)
        return super().forward(x) * self.vector[:, None, None]


def clip_weight(self):
    with torch.no_grad():
        self.weight.clamp_(-0.1, 0.1)
        self.weight[0].mul_(0.9)


def limit_norm(self):
    self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)


def iterate_power(self):
    rows = self.weight.data.flatten(1)
    self.vector.data.copy_(nn.functional.normalize(rows @ (rows.t() @ self.vector.data), dim=0))


def average_weights(self):
    with torch.no_grad():
        self.vector.data = self.vector.data * 0.9 + self.bias.data * 0.1


def scale_frozen(self):
    self.vector.mul_(0.9)


@pytest.mark.parametrize("write", [clip_weight, limit_norm, iterate_power, average_weights, scale_frozen])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.long
def test_written_parameters(write, trained):
    """Such as weights of limited norm, power iterations and averages of weights (MoCo)."""
    if trained and write is scale_frozen:
        pytest.skip("PyTorch rejects it")
    check_module(WrittenConv(write, trained), IMAGES, grids=GRIDS)


def test_written_parameters_are_trained_as_on_one_process():
    image, target = torch.randn(IMAGES), torch.randn(2, 3, 7, 5)

    def train(module, run, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            run(module).backward()
            optimizer.step()
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    def body(world):
        module = copy.deepcopy(original)
        with nd.ProcessGrid(world, rows=world.size) as grid:
            model = ndt.distribute(module, IMAGES, grid)
            optimizer = ndt.DistributedOptimizer(model, torch.optim.Adam, strategy="ShardedOptimizer", lr=0.1)

            def run(_):
                return model.loss(nn.MSELoss(), model(model.scatter(image)), model.scatter_target(target))

            return train(module, run, optimizer)

    for write in limit_norm, average_weights:
        original = WrittenConv(write)
        module = copy.deepcopy(original)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        expected = train(module, lambda m: nn.functional.mse_loss(m(image), target), torch.optim.Adam(trained, lr=0.1))
        for state in nd.loopback.run(2, body):
            torch.testing.assert_close(state, expected)


class WrittenAfterRead(nn.Conv2d):
    def forward(self, x):
        y = super().forward(x)
        self.weight.data.clamp_(-0.1, 0.1)
        return y


def keep_old_values(self):
    old = self.vector.detach()
    self.vector.data = self.vector.data * 2
    self.old = old * 2
    self.vector.data.mul_(old)


def share_values(self):
    self.vector.data = self.bias.data


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (WrittenAfterRead(3, 3, 3), "modifies the parameter '0.weight' in place"),
        (WrittenConv(keep_old_values), "assigning Tensor.data is not recorded if the old or new values are also used"),
        (WrittenConv(share_values), "assigning Tensor.data is not recorded if the old or new values are also used"),
    ],
    ids=["read before", "old values", "shared values"],
)
def test_ambiguous_writes_are_rejected(module, message):
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.UserError) as caught:
        ndt.distribute(nn.Sequential(module), IMAGES, grid)
    assert message in str(caught.value)
    assert __file__ in str(caught.value)
