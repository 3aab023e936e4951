"""Training scripts over a module of PyTorch, each for one process and for tiles alike: what they return must be equal.

A script is given `start(module, shape)`, which returns a model: `OneProcess`, or what `distribute` returns.
"""

import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 3
IMAGES = (2, 3, 11, 9)


class OneProcess:
    """The module itself, with the methods of a distributed one."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)

    def __getattr__(self, name):
        return getattr(self.module, name)

    def scatter(self, x):
        return x.clone()

    scatter_target = scatter

    def gather(self, y):
        return torch.utils._pytree.tree_map(lambda t: t.detach().clone(), y)

    def loss(self, criterion, y, target):
        return criterion(y, target)


class Net(nn.Module):
    """Batch norm, a skip connection, a resolution between; `shared` is used twice."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.shared = nn.Conv2d(4, 4, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        x = self.dropout(F.relu(self.norm(self.first(x))))
        low = self.shared(F.max_pool2d(self.shared(x), 2))
        return self.last(torch.cat([x, F.interpolate(low, x.shape[2:], mode="bilinear")], 1))


class TwoOutputs(nn.Module):
    """A dictionary, as the segmentation models of torchvision give."""

    def __init__(self):
        super().__init__()
        self.net, self.head = Net(), nn.Conv2d(3, CLASSES, 3, stride=2)

    def forward(self, x):
        return {"out": self.net(x), "aux": self.head(x)}


class Attends(nn.Module):
    """Each cell looks at all."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 1), nn.Conv2d(4, CLASSES, 1)

    def forward(self, x):
        q, k, v = self.first(x).flatten(2).mT.chunk(3, -1)
        return self.last(F.scaled_dot_product_attention(q, k, v).mT.unflatten(2, x.shape[2:]))


def classifier():
    """One vector of classes for each image."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))


SEED = threading.Lock()


def made(build):
    """Return the module, with the same weights on all ranks, which may be threads."""
    with SEED:
        torch.manual_seed(0)
        return build().double()


def drawn(*shape, step=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def labels(*shape, step=0):
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(step))


N, CELLS = IMAGES[0], (IMAGES[0], *IMAGES[2:])


def dice(y, target):
    """One minus the overlap: sums over all cells, divided by sums."""
    p, t = y.softmax(1), F.one_hot(target, CLASSES).movedim(-1, 1).to(y.dtype)
    return 1 - ((2 * (p * t).sum((0, 2, 3)) + 1) / ((p + t).sum((0, 2, 3)) + 1)).mean()


def mean_square(y, target):
    return (y - target).square().mean()


def both(outputs, target):
    return F.cross_entropy(outputs["out"], target["out"]) + 0.4 * F.cross_entropy(outputs["aux"], target["aux"])


def some_ignored(target):
    target[:, 2:5] = 1
    target[0, :, 4:] = -100
    return target


def _weights():
    return torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


OUTPUT = (N, CLASSES, *IMAGES[2:])
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), lambda: labels(*CELLS)),
    "cross entropy, sum": (nn.CrossEntropyLoss(reduction="sum"), lambda: labels(*CELLS)),
    "cross entropy, weights": (nn.CrossEntropyLoss(_weights()), lambda: some_ignored(labels(*CELLS))),
    "cross entropy, ignored": (nn.CrossEntropyLoss(ignore_index=2), lambda: labels(*CELLS)),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda: some_ignored(labels(*CELLS))),
    "cross entropy, smoothed, weights": (
        nn.CrossEntropyLoss(_weights(), label_smoothing=0.2),
        lambda: some_ignored(labels(*CELLS)),
    ),
    "cross entropy, smoothed, weights, sum": (
        nn.CrossEntropyLoss(_weights(), label_smoothing=0.2, reduction="sum"),
        lambda: labels(*CELLS),
    ),
    "cross entropy, probabilities": (nn.CrossEntropyLoss(_weights()), lambda: drawn(*OUTPUT).softmax(1)),
    "mean square": (nn.MSELoss(), lambda: drawn(*OUTPUT)),
    "sum of squares": (nn.MSELoss(reduction="sum"), lambda: drawn(*OUTPUT)),
    "absolute": (nn.L1Loss(), lambda: drawn(*OUTPUT)),
    "logits": (nn.BCEWithLogitsLoss(), lambda: drawn(*OUTPUT).sigmoid()),
    "logits, weights": (
        nn.BCEWithLogitsLoss(pos_weight=_weights()[:, None, None], weight=_weights().flip(0)[:, None, None]),
        lambda: drawn(*OUTPUT).sigmoid(),
    ),
    "smooth": (nn.SmoothL1Loss(beta=0.5), lambda: drawn(*OUTPUT)),
    "huber": (nn.HuberLoss(), lambda: drawn(*OUTPUT)),
    "likelihood": (lambda y, t: F.nll_loss(y.log_softmax(1), t), lambda: labels(*CELLS)),
    "dice": (dice, lambda: labels(*CELLS)),
    "own mean": (mean_square, lambda: drawn(*OUTPUT)),
    "dice and cross entropy": (lambda y, t: dice(y, t) + F.cross_entropy(y, t), lambda: labels(*CELLS)),
}


def one_loss(start, build, criterion, target):
    """Return the loss, the output and all gradients."""
    model = start(made(build), IMAGES)
    x = model.scatter(drawn(*IMAGES)).requires_grad_()
    y = model(x)
    loss = model.loss(criterion, y, torch.utils._pytree.tree_map(model.scatter_target, target))
    loss.backward()
    return {
        "loss": loss.detach(),
        "y": model.gather(y),
        "dx": model.gather(x.grad),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


CRITERION = nn.CrossEntropyLoss()
"""that of all scripts: captured once, where ranks share what they capture"""


def script(start, build=Net, optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), steps=3, **more):
    """Return the losses of some steps, and the state after them."""
    module = made(build)
    model = start(module, IMAGES)
    prepare = more.get("prepare", lambda model: None)
    prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} <= {id(p) for p in module.parameters()}
    chosen = optimizer(trained)
    losses = []
    for step in range(steps):
        chosen.zero_grad(set_to_none=bool(step % 2))
        for part in range(more.get("parts", 1)):
            key = 10 * step + part
            x = model.scatter(drawn(*IMAGES, step=key).to(next(model.parameters()).dtype))
            target = labels(*(CELLS if build is not classifier else (N,)), step=key)
            loss = model.loss(CRITERION, more.get("call", lambda m, x: m(x))(model, x), model.scatter_target(target))
            loss.backward()
            losses.append(loss.item())
        more.get("before_step", lambda model: None)(model)
        chosen.step()
    return {"losses": torch.tensor(losses), "state": dict(model.state_dict())}


def frozen(model):
    model.first.requires_grad_(False)


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


def checkpointed_reentrant(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def with_scaler(start):
    model = start(made(Net), IMAGES)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        x, target = model.scatter(drawn(*IMAGES, step=step)), model.scatter_target(labels(*CELLS, step=step))
        optimizer.zero_grad()
        scaler.scale(model.loss(F.cross_entropy, model(x), target)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    return {"state": dict(model.state_dict()), "scale": torch.tensor(scaler.get_scale())}


def modes(start):
    """Evaluation under inference_mode, and steps of that mode; training, evaluation without gradients, training."""
    model = start(made(Net), IMAGES)
    optimizer, found = torch.optim.Adam(model.parameters(), 0.02), {}
    model.eval()
    with torch.inference_mode():
        found["first"] = model.gather(model(model.scatter(drawn(*IMAGES)))).clone()
    model.loss(F.cross_entropy, model(model.scatter(drawn(*IMAGES))), model.scatter_target(labels(*CELLS))).backward()
    optimizer.step()
    for epoch in range(2):
        model.train()
        x, target = model.scatter(drawn(*IMAGES, step=epoch)), model.scatter_target(labels(*CELLS, step=epoch))
        optimizer.zero_grad()
        model.loss(F.cross_entropy, model(x), target).backward()
        optimizer.step()
        model.eval()
        for name, without in {"no_grad": torch.no_grad, "inference": torch.inference_mode}.items():
            with without():
                y = model(x)
                assert not y.requires_grad
                found[f"{name} {epoch}"] = model.gather(y).clone()
                found[f"loss {name} {epoch}"] = model.loss(F.cross_entropy, y, target).clone()
    return found | {"state": dict(model.state_dict())}


def two_outputs(start):
    target = {"out": labels(*CELLS), "aux": labels(N, 5, 4)}
    return one_loss(start, TwoOutputs, both, target)


def squares(y, target):
    return y.square().sum()


def parts_of_modules(start):
    """A gradient that is not that of a loss, of one of two outputs."""
    model = start(made(TwoOutputs), IMAGES)
    y = model(model.scatter(drawn(*IMAGES)))["aux"]
    loss = model.loss(squares, y, model.scatter_target(labels(N)))
    loss.backward()
    return {"gradients": {name: p.grad for name, p in model.named_parameters()}}


SCRIPTS = {
    "SGD": script,
    "Adam, clipped": lambda start: script(
        start,
        optimizer=lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1),
        before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    ),
    "frozen": lambda start: script(start, prepare=frozen),
    "accumulated": lambda start: script(start, parts=2),
    "checkpoint": lambda start: script(start, call=checkpointed),
    "checkpoint, reentrant": lambda start: script(start, call=checkpointed_reentrant),
    "scaled": with_scaler,
    "modes": modes,
    "two outputs": two_outputs,
    "one of two outputs": parts_of_modules,
    "classifier": lambda start: script(start, classifier),
    "attention": lambda start: one_loss(start, Attends, CRITERION, labels(*CELLS)),
}


def off(found, expected):
    """Return the largest difference, relative to the largest number of its tensor."""
    flat, wanted = (torch.utils._pytree.tree_leaves(each) for each in (found, expected))
    assert len(flat) == len(wanted)
    worst = 0.0
    for a, b in zip(flat, wanted, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.shape == b.shape
            a, b = a.detach().double(), b.detach().double()
            worst = max(worst, ((a - b).abs().max() / max(1e-3, b.abs().max().item())).item())
    return worst


ON_RANKS = "modes", "two outputs", "attention"


def main(transport):
    """On ranks of MPI, or of torch.distributed: the scripts ON_RANKS; with MPI, at last a mistake on one rank."""
    import neondist as nd
    import neondist.torch as ndt
    from neondist.torch.rules import product

    torch.set_num_threads(1)
    product.RING_BYTES = 0
    world = ndt.world() if transport == "torch" else nd.ProcessGrid().world
    with nd.ProcessGrid(world) as grid:
        for name in ON_RANKS:
            expected = SCRIPTS[name](lambda module, _: OneProcess(module))
            wrong = off(SCRIPTS[name](lambda module, shape: ndt.distribute(module, shape, grid)), expected)
            assert wrong < 1e-9, f"{world.size} ranks, rank {world.rank}: {name} is off by {wrong:.1e}"
    print(f"rank {world.rank} of {world.size}: all equal", flush=True)
    if transport == "mpi":
        grid = nd.ProcessGrid()
        model = ndt.distribute(nn.Conv2d(1, 2, 3), (1, 1, 12, 10), grid)
        x = model.scatter(torch.ones(1, 1, 12, 10))
        model(x[..., 1:] if grid.rank else x)


if __name__ == "__main__":
    main(sys.argv[1])
