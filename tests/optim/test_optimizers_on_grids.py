"""Clipping, weight decay, weight averaging and layer-wise norms against PyTorch, on every grid and after resumption."""

import numpy as np
import pytest
from common_checks import max_relative_difference

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError
from neondist.optim import FlatLayout
from neondist.train import evaluate_checkpoint

SIZES = (5, 3, 33_000, 1)


def draw_gradients(steps=5):
    rng = np.random.default_rng(0)
    start = rng.normal(size=sum(SIZES))
    return start, [rng.normal(size=start.size) for _ in range(steps)]


def make_layout(decays=(True, False, True, False)):
    ends = np.cumsum(SIZES).tolist()
    return FlatLayout(tuple(zip([0, *ends], ends, strict=False)), tuple(decays), len(decays))


def run_neondist(optimizer, start, gradients, scale=1.0):
    params, slots = start.copy(), optimizer.create_slots(start)
    for step, grads in enumerate(gradients):
        optimizer.update(params, grads.copy(), slots, step, scale, make_layout())
    return params, slots


def split_parameters(array):
    return np.split(array, np.cumsum(SIZES)[:-1])


def run_torch(make, start, gradients, clip=None, ema=None, decay=0.0):
    torch = pytest.importorskip("torch")
    tensors = [torch.nn.Parameter(torch.from_numpy(part.copy())) for part in split_parameters(start)]
    groups = [{"params": tensors[0::2], "weight_decay": decay}, {"params": tensors[1::2], "weight_decay": 0.0}]
    optimizer = make(torch.optim, groups)
    module = torch.nn.ParameterList(tensors)
    averages = None
    if ema is not None:
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        averages = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(ema))
    for grads in gradients:
        for tensor, part in zip(tensors, split_parameters(grads), strict=True):
            tensor.grad = torch.from_numpy(part.copy())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(tensors, clip)
        optimizer.step()
        if averages is not None:
            averages.update_parameters(module)
    groups = [tensors, list(averages.module) if averages is not None else tensors]
    return [np.concatenate([tensor.detach().numpy() for tensor in tensors_of_group]) for tensors_of_group in groups]


OPTIMIZERS = {
    "sgd": (lambda **options: nd.SGD(0.1, momentum=0.9, **options), lambda o, p: o.SGD(p, lr=0.1, momentum=0.9)),
    "adamw": (
        lambda **options: nd.AdamW(0.02, beta1=0.8, **options),
        lambda o, p: o.AdamW(p, lr=0.02, betas=(0.8, 0.999)),
    ),
    "rmsprop": (lambda **options: nd.RMSprop(0.02, **options), lambda o, p: o.RMSprop(p, lr=0.02)),
    "rmsprop with all options": (
        lambda **options: nd.RMSprop(0.02, alpha=0.9, momentum=0.5, centered=True, eps=1e-3, **options),
        lambda o, p: o.RMSprop(p, lr=0.02, alpha=0.9, momentum=0.5, centered=True, eps=1e-3),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 1.5, 1e6])
def test_optimizers_match_torch(name, clip):
    make, make_torch = OPTIMIZERS[name]
    start, gradients = draw_gradients()
    optimizer = make(weight_decay=0.1, decay_all=False, clip_norm=clip, ema=0.7)
    params, slots = run_neondist(optimizer, start, gradients)
    expected, average = run_torch(make_torch, start, gradients, clip, 0.7, 0.1)
    np.testing.assert_allclose(params, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(slots["average"], average, rtol=1e-12, atol=1e-13)


def apply_lamb(start, gradients, rate, decay, betas=(0.9, 0.999), eps=1e-6):
    """Apply LAMB as published, layer by layer."""
    x, m, v = ([part.copy() for part in split_parameters(array)] for array in (start, 0 * start, 0 * start))
    for t, grads in enumerate(gradients, start=1):
        for i, g in enumerate(split_parameters(grads)):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            r = (m[i] / (1 - betas[0] ** t)) / (np.sqrt(v[i] / (1 - betas[1] ** t)) + eps)
            u = r + (decay * x[i] if i % 2 == 0 else 0)
            size = np.linalg.norm(x[i])
            x[i] -= rate * (size / np.linalg.norm(u) if size else 1) * u
    return np.concatenate(x)


def test_lamb_matches_the_paper():
    start, gradients = draw_gradients()
    start[: SIZES[0]] = 0
    params, _ = run_neondist(nd.LAMB(0.05, weight_decay=0.1, decay_all=False), start, gradients)
    np.testing.assert_allclose(params, apply_lamb(start, gradients, 0.05, 0.1), rtol=1e-12, atol=1e-13)


MODEL_OPTIMIZERS = {
    "clipped": lambda: nd.SGD(0.5, momentum=0.9, clip_norm=0.3, weight_decay=0.01, decay_all=False),
    "lamb": lambda: nd.LAMB(0.05, clip_norm=0.5, decay_all=False, ema=0.8),
    "adamw": lambda: nd.AdamW(0.01, clip_norm=0.1, ema=0.5),
    "rmsprop": lambda: nd.RMSprop(0.001, momentum=0.5, centered=True, eps=1e-3),
}


def make_model(optimizer, schedule=None):
    """Return a model with replicated, tiled and sharded parameters."""
    layers = [
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.Tanh()),
        nd.BatchNormLayerDist(),
        nd.LocalFilteringLayerDist(2, 3, bias=True),
        nd.FCLayerDist(3),
    ]
    rule = MODEL_OPTIMIZERS[optimizer]()
    rule.schedule = schedule
    return nd.ConvnetDist(layers, optimizer=rule, seed=2, dtype="float64", backend="numpy")


def train(optimizer, grid=None):
    model = make_model(optimizer)
    model.build((7, 8, 2), 6, grid)
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(6, 7, 8, 2)), rng.integers(0, 3, 6)
    losses = [model.train_batch(model.scatter(x), labels) for _ in range(4)]
    sent, planned = model.bytes_summed, sum(model.compiled.reduction_bytes(model.grid.rank).values())
    arrays = model.state() | model.optimizer_state() | {"loss": np.array(losses)}
    with model.use_averaged_weights():
        arrays["averaged"] = model.gather(model.fprop(model.scatter(x), training=False))
    arrays["raw"] = model.gather(model.fprop(model.scatter(x), training=False))
    return arrays, sent, planned


@pytest.mark.parametrize("optimizer", MODEL_OPTIMIZERS)
@pytest.mark.long
def test_norms_are_global_on_every_grid(optimizer):
    serial, _, _ = train(optimizer, nd.ProcessGrid.serial())
    has_average = any("average" in name for name in serial if name != "averaged")
    assert np.allclose(serial["averaged"], serial["raw"]) is not has_average
    for ranks, replicas in [(2, 2), (3, 1), (4, 2), (6, 1)]:
        job = lambda comm, r=replicas: train(optimizer, nd.ProcessGrid(comm, replicas=r))  # noqa: E731
        for actual, summed, planned in loopback.run(ranks, job):
            assert max_relative_difference(actual, serial) < 1e-9
            assert summed == 4 * planned


def make_experiment(optimizer, epochs, metrics=()):
    dataset = nd.Synthetic((7, 8, 2), classes=3, train=12, test=5, validation=4)
    schedule = nd.Warmup(0.5, then=nd.Plateau(0.5, patience=0, threshold=0.5))
    return nd.FitExperiment(dataset, make_model(optimizer, schedule), batch_size=4, epochs=epochs, metrics=metrics)


@pytest.mark.parametrize("optimizer", ["lamb", "rmsprop"])
@pytest.mark.long
def test_resumed_run_is_identical(optimizer, tmp_path):
    def run(comm, folder, epochs, resume=False):
        experiment = make_experiment(optimizer, epochs)
        history = experiment.run(experiment.open_grid(comm), output=tmp_path / folder, resume=resume, hooks=[]).history
        return (
            history,
            experiment.model.state() | experiment.model.optimizer_state(),
            experiment.model.learning_rate_scale,
        )

    uninterrupted = loopback.run(2, lambda comm: run(comm, "uninterrupted", 4))[0]
    for ranks, folder, difference in ((2, "same", 0), (3, "other", 1e-9)):
        loopback.run(2, lambda comm, f=folder: run(comm, f, 2))
        resumed = loopback.run(ranks, lambda comm, f=folder: run(comm, f, 4, True))[0]
        assert max_relative_difference(resumed[1], uninterrupted[1]) <= difference
        assert resumed[0][-1]["validation_loss"] == pytest.approx(uninterrupted[0][-1]["validation_loss"], rel=1e-9)
        assert resumed[2] == uninterrupted[2] < 1
    if optimizer == "lamb":  # the checkpoint is evaluated with averaged weights
        experiment = make_experiment(optimizer, 4)
        metrics = evaluate_checkpoint(experiment, tmp_path / "same" / "checkpoint.h5", nd.ProcessGrid.serial())
        assert metrics["loss"] == pytest.approx(uninterrupted[0][-1]["test_loss"], rel=1e-9)


def compute_torch_factors(make, steps, losses=None):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, factors = make(torch.optim.lr_scheduler, optimizer), []
    for index in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step(*(() if losses is None else (losses[index],)))
    return factors


SCHEDULES = {
    "step": (nd.StepDecay(3, 0.5), lambda s, o: s.StepLR(o, 3, 0.5)),
    "cosine": (nd.CosineDecay(11, floor=0.2), lambda s, o: s.CosineAnnealingLR(o, 11, eta_min=0.2)),
    "warm-up": (nd.Warmup(4, start=0.25), lambda s, o: s.LinearLR(o, 0.25, total_iters=4)),
    "warm-up, cosine": (
        nd.Warmup(4, start=0.25, then=nd.CosineDecay(7)),
        lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 0.25, total_iters=4), s.CosineAnnealingLR(o, 7)], [4]),
    ),
    "one cycle": (
        nd.OneCycle(11, rise=3 / 11),
        lambda s, o: s.OneCycleLR(o, 1.0, total_steps=12, pct_start=4 / 12, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_match_torch(name):
    schedule, make_torch = SCHEDULES[name]
    expected = compute_torch_factors(make_torch, 12)
    np.testing.assert_allclose([schedule.factor(epoch) for epoch in range(12)], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("optimizer_class", "torch_name", "options"),
    [
        (nd.SGD, "SGD", {"momentum": 0.9}),
        (nd.SGD, "SGD", {"momentum": 0.9, "nesterov": True}),
        (nd.RMSprop, "RMSprop", {"momentum": 0.9}),
        (nd.Adam, "Adam", {}),
    ],
)
def test_one_cycle_momentum_matches_torch(optimizer_class, torch_name, options):
    torch = pytest.importorskip("torch")
    x, target = np.linspace(-1, 1, 5), np.arange(5.0)
    weights = torch.nn.Parameter(torch.tensor(x))
    optimizer = getattr(torch.optim, torch_name)([weights], lr=0.1, **options)
    torch_schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=13, pct_start=4 / 13)
    layer = nd.FCLayer(5, bias=False)
    rule = optimizer_class(0.1, schedule=nd.OneCycle(12, rise=3 / 12, momentum=(0.85, 0.95)), **options)
    model = nd.MLP([layer], cost=nd.SumSquared(), optimizer=rule, dtype="float64")
    model.build((1, 1, 1), 1)
    layer.params["weights"][...] = x
    rule.check_schedule_covers(12)
    for step in range(12):
        optimizer.zero_grad()
        ((weights - torch.tensor(target)) ** 2).sum().mul(0.5).backward()
        optimizer.step()
        torch_schedule.step()
        model.learning_rate_scale, model.scheduled_momentum = rule.rate_factor_at(step), rule.momentum_at(step)
        model.train_batch(np.ones((1, 1, 1, 1)), target[None])
        np.testing.assert_allclose(layer.params["weights"][0], weights.detach(), rtol=1e-10)


def test_momentum_follows_the_schedule():
    momenta = []

    class MomentumRecorder(nd.Hook):
        def after_step(self, run):
            momenta.append(run.model.scheduled_momentum)

    rule = nd.Adam(schedule=nd.Warmup(1, then=nd.OneCycle(2, rise=0.5, momentum=(0.5, 0.9))))
    dataset = nd.Synthetic((5, 5, 1), classes=2, train=4, test=2)
    experiment = nd.FitExperiment(
        dataset, nd.MLP([nd.FCLayer(2)], optimizer=rule), batch_size=2, epochs=3, dist_flag=False
    )
    experiment.run(hooks=[MomentumRecorder()])
    np.testing.assert_allclose(np.array(momenta, float), [np.nan, np.nan, 0.9, 0.7, 0.5, 0.7], rtol=1e-12)


def test_plateau_matches_torch():
    losses = np.abs(np.random.default_rng(0).normal(size=60)) / np.sqrt(1 + np.arange(60))
    for options in ({"patience": 2}, {"patience": 0, "cooldown": 3, "floor": 0.02}, {"patience": 1, "threshold": 0.2}):
        torch_options = {"min_lr" if name == "floor" else name: value for name, value in options.items()}
        expected = compute_torch_factors(
            lambda s, o, h=torch_options: s.ReduceLROnPlateau(o, factor=0.5, eps=0, **h), 60, losses
        )
        schedule = nd.Plateau(0.5, **options)
        factors = [schedule.factor_given_losses(epoch, losses[:epoch].tolist()) for epoch in range(60)]
        np.testing.assert_allclose(factors, expected, rtol=1e-12)
    assert nd.Plateau(0.5, patience=0).factor_given_losses(3, [1.0, None, float("nan")]) == 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nd.SGD(clip_norm=0), "clip_norm: expected a number above 0"),
        (lambda: nd.AdamW(ema=1.0), "ema: .*below 1"),
        (lambda: nd.RMSprop(alpha=1.0), "alpha: .*below 1"),
        (lambda: nd.Plateau(1.0), "factor: .*below 1"),
        (lambda: nd.Warmup(0), "epochs: expected a number above 0"),
        (lambda: nd.OneCycle(3).check_schedule_covers(4), "the schedule ends after 3 epochs, but is used for 4"),
        (lambda: nd.Warmup(1, then=nd.CosineDecay(3)).check_schedule_covers(5), "after 3 epochs, but is used for 4"),
        (lambda: nd.SGD(schedule=nd.SGD()), "schedule: expected"),
        (
            lambda: nd.SGD(schedule=nd.OneCycle(3, momentum=(0.85, 0.95))).check_schedule_covers(3),
            "momentum: SGD has no momentum",
        ),
    ],
)
def test_error_messages(make, message):
    nd.CosineDecay(3, floor=0.1).check_schedule_covers(5)
    assert nd.LAMB(clip_norm=2).arguments()["weight_decay"] == 0.01
    with pytest.raises(ConfigError, match=message):
        make()
