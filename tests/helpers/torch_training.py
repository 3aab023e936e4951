"""Training scripts over PyTorch modules, which must return equal results on one process and on tiles.

The argument of a script, `start(module, shape)`, returns a `SerialModel` or the result of `distribute`.
"""

import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 3
IMAGES = (2, 3, 11, 9)


class SerialModel:
    """Module on one process with the interface of a distributed one."""

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
    """Network with batch norm, a skip connection and a lower resolution; `shared` is used twice."""

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
    """Network with a dictionary of outputs, like the segmentation models of torchvision."""

    def __init__(self):
        super().__init__()
        self.net, self.head = Net(), nn.Conv2d(3, CLASSES, 3, stride=2)

    def forward(self, x):
        return {"out": self.net(x), "aux": self.head(x)}


class AttentionModel(nn.Module):
    """Attention over all cells."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 1), nn.Conv2d(4, CLASSES, 1)

    def forward(self, x):
        q, k, v = self.first(x).flatten(2).mT.chunk(3, -1)
        return self.last(F.scaled_dot_product_attention(q, k, v).mT.unflatten(2, x.shape[2:]))


def classifier():
    """Return a classifier of images."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))


SEED_LOCK = threading.Lock()


def build_seeded(create):
    """Return a module with the same weights on all ranks, which may be threads."""
    with SEED_LOCK:
        torch.manual_seed(0)
        return create().double()


def draw_tensor(*shape, step=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def draw_labels(*shape, step=0):
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(step))


N, CELLS = IMAGES[0], (IMAGES[0], *IMAGES[2:])


def dice(y, target):
    """Return the Dice loss: sums over all cells, divided by sums."""
    p, t = y.softmax(1), F.one_hot(target, CLASSES).movedim(-1, 1).to(y.dtype)
    return 1 - ((2 * (p * t).sum((0, 2, 3)) + 1) / ((p + t).sum((0, 2, 3)) + 1)).mean()


def mean_square(y, target):
    return (y - target).square().mean()


def two_output_loss(outputs, target):
    return F.cross_entropy(outputs["out"], target["out"]) + 0.4 * F.cross_entropy(outputs["aux"], target["aux"])


def mark_ignored(target):
    target[:, 2:5] = 1
    target[0, :, 4:] = -100
    return target


def _weights():
    return torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


OUTPUT_SHAPE = (N, CLASSES, *IMAGES[2:])
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), lambda: draw_labels(*CELLS)),
    "cross entropy, sum": (nn.CrossEntropyLoss(reduction="sum"), lambda: draw_labels(*CELLS)),
    "cross entropy, weights": (nn.CrossEntropyLoss(_weights()), lambda: mark_ignored(draw_labels(*CELLS))),
    "cross entropy, ignored": (nn.CrossEntropyLoss(ignore_index=2), lambda: draw_labels(*CELLS)),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda: mark_ignored(draw_labels(*CELLS))),
    "cross entropy, smoothed, weights": (
        nn.CrossEntropyLoss(_weights(), label_smoothing=0.2),
        lambda: mark_ignored(draw_labels(*CELLS)),
    ),
    "cross entropy, smoothed, weights, sum": (
        nn.CrossEntropyLoss(_weights(), label_smoothing=0.2, reduction="sum"),
        lambda: draw_labels(*CELLS),
    ),
    "cross entropy, probabilities": (nn.CrossEntropyLoss(_weights()), lambda: draw_tensor(*OUTPUT_SHAPE).softmax(1)),
    "mean square": (nn.MSELoss(), lambda: draw_tensor(*OUTPUT_SHAPE)),
    "sum of squares": (nn.MSELoss(reduction="sum"), lambda: draw_tensor(*OUTPUT_SHAPE)),
    "absolute": (nn.L1Loss(), lambda: draw_tensor(*OUTPUT_SHAPE)),
    "logits": (nn.BCEWithLogitsLoss(), lambda: draw_tensor(*OUTPUT_SHAPE).sigmoid()),
    "logits, weights": (
        nn.BCEWithLogitsLoss(pos_weight=_weights()[:, None, None], weight=_weights().flip(0)[:, None, None]),
        lambda: draw_tensor(*OUTPUT_SHAPE).sigmoid(),
    ),
    "smooth": (nn.SmoothL1Loss(beta=0.5), lambda: draw_tensor(*OUTPUT_SHAPE)),
    "huber": (nn.HuberLoss(), lambda: draw_tensor(*OUTPUT_SHAPE)),
    "likelihood": (lambda y, t: F.nll_loss(y.log_softmax(1), t), lambda: draw_labels(*CELLS)),
    "dice": (dice, lambda: draw_labels(*CELLS)),
    "own mean": (mean_square, lambda: draw_tensor(*OUTPUT_SHAPE)),
    "dice and cross entropy": (lambda y, t: dice(y, t) + F.cross_entropy(y, t), lambda: draw_labels(*CELLS)),
}


def compute_loss(start, create, criterion, target):
    """Return the loss, the output and all gradients."""
    model = start(build_seeded(create), IMAGES)
    x = model.scatter(draw_tensor(*IMAGES)).requires_grad_()
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
"""loss of all scripts, captured once if ranks share captures"""


def train_steps(
    start, create=Net, create_optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), steps=3, **options
):
    """Return the losses of some steps and the final state."""
    module = build_seeded(create)
    model = start(module, IMAGES)
    options.get("prepare", lambda model: None)(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in parameters} <= {id(p) for p in module.parameters()}
    optimizer = create_optimizer(parameters)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        for part in range(options.get("parts", 1)):
            seed = 10 * step + part
            x = model.scatter(draw_tensor(*IMAGES, step=seed).to(next(model.parameters()).dtype))
            target = draw_labels(*(CELLS if create is not classifier else (N,)), step=seed)
            loss = model.loss(CRITERION, options.get("call", lambda m, x: m(x))(model, x), model.scatter_target(target))
            loss.backward()
            losses.append(loss.item())
        options.get("before_step", lambda model: None)(model)
        optimizer.step()
    return {"losses": torch.tensor(losses), "state": dict(model.state_dict())}


def freeze_first(model):
    model.first.requires_grad_(False)


def call_checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


def call_checkpointed_reentrant(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def train_with_scaler(start):
    model = start(build_seeded(Net), IMAGES)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        x, target = model.scatter(draw_tensor(*IMAGES, step=step)), model.scatter_target(draw_labels(*CELLS, step=step))
        optimizer.zero_grad()
        scaler.scale(model.loss(F.cross_entropy, model(x), target)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    return {"state": dict(model.state_dict()), "scale": torch.tensor(scaler.get_scale())}


def alternate_modes(start):
    """Alternate between evaluation under inference_mode or no_grad and training, in train and eval mode."""
    model = start(build_seeded(Net), IMAGES)
    optimizer, results = torch.optim.Adam(model.parameters(), 0.02), {}
    model.eval()
    with torch.inference_mode():
        results["first"] = model.gather(model(model.scatter(draw_tensor(*IMAGES)))).clone()
    model.loss(
        F.cross_entropy, model(model.scatter(draw_tensor(*IMAGES))), model.scatter_target(draw_labels(*CELLS))
    ).backward()
    optimizer.step()
    for epoch in range(2):
        model.train()
        x, target = (
            model.scatter(draw_tensor(*IMAGES, step=epoch)),
            model.scatter_target(draw_labels(*CELLS, step=epoch)),
        )
        optimizer.zero_grad()
        model.loss(F.cross_entropy, model(x), target).backward()
        optimizer.step()
        model.eval()
        for name, context in {"no_grad": torch.no_grad, "inference": torch.inference_mode}.items():
            with context():
                y = model(x)
                assert not y.requires_grad
                results[f"{name} {epoch}"] = model.gather(y).clone()
                results[f"loss {name} {epoch}"] = model.loss(F.cross_entropy, y, target).clone()
    return results | {"state": dict(model.state_dict())}


def train_two_outputs(start):
    target = {"out": draw_labels(*CELLS), "aux": draw_labels(N, 5, 4)}
    return compute_loss(start, TwoOutputs, two_output_loss, target)


def sum_of_squares(y, target):
    return y.square().sum()


def train_one_output(start):
    """Train on the sum of squares of one of two outputs."""
    model = start(build_seeded(TwoOutputs), IMAGES)
    y = model(model.scatter(draw_tensor(*IMAGES)))["aux"]
    loss = model.loss(sum_of_squares, y, model.scatter_target(draw_labels(N)))
    loss.backward()
    return {"gradients": {name: p.grad for name, p in model.named_parameters()}}


SCRIPTS = {
    "SGD": train_steps,
    "Adam, clipped": lambda start: train_steps(
        start,
        create_optimizer=lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1),
        before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    ),
    "frozen": lambda start: train_steps(start, prepare=freeze_first),
    "accumulated": lambda start: train_steps(start, parts=2),
    "checkpoint": lambda start: train_steps(start, call=call_checkpointed),
    "checkpoint, reentrant": lambda start: train_steps(start, call=call_checkpointed_reentrant),
    "scaled": train_with_scaler,
    "modes": alternate_modes,
    "two outputs": train_two_outputs,
    "one of two outputs": train_one_output,
    "classifier": lambda start: train_steps(start, classifier),
    "attention": lambda start: compute_loss(start, AttentionModel, CRITERION, draw_labels(*CELLS)),
}


def max_relative_difference(actual, expected):
    """Return the largest difference relative to the maximum of its tensor."""
    values, reference = (torch.utils._pytree.tree_leaves(tree) for tree in (actual, expected))
    assert len(values) == len(reference)
    largest = 0.0
    for a, b in zip(values, reference, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.shape == b.shape
            a, b = a.detach().double(), b.detach().double()
            largest = max(largest, ((a - b).abs().max() / max(1e-3, b.abs().max().item())).item())
    return largest


SCRIPTS_ON_RANKS = "modes", "two outputs", "attention"


def main(transport):
    """Run SCRIPTS_ON_RANKS on ranks of MPI or torch.distributed; with MPI, finish with a mistake on one rank."""
    import neondist as nd
    import neondist.torch as ndt
    from neondist.torch.rules import product

    torch.set_num_threads(1)
    product.MIN_RING_BYTES = 0
    world = ndt.world() if transport == "torch" else nd.ProcessGrid().world
    with nd.ProcessGrid(world) as grid:
        for name in SCRIPTS_ON_RANKS:
            expected = SCRIPTS[name](lambda module, _: SerialModel(module))
            difference = max_relative_difference(
                SCRIPTS[name](lambda module, shape: ndt.distribute(module, shape, grid)), expected
            )
            assert difference < 1e-9, f"{world.size} ranks, rank {world.rank}: {name} is off by {difference:.1e}"
    print(f"rank {world.rank} of {world.size}: all equal", flush=True)
    if transport == "mpi":
        grid = nd.ProcessGrid()
        model = ndt.distribute(nn.Conv2d(1, 2, 3), (1, 1, 12, 10), grid)
        x = model.scatter(torch.ones(1, 1, 12, 10))
        model(x[..., 1:] if grid.rank else x)


if __name__ == "__main__":
    main(sys.argv[1])
