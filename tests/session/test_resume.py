"""Resumption of sessions at any step, bit for bit equal to an uninterrupted session."""

import shutil
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import loopback
from neondist.session.state import create_session_state

LAST = 9


def build_layer_model(grid):
    layers = [nd.ConvLayerDist(2, 3, padding=1), nd.DropoutLayerDist(0.3), nd.BatchNormLayerDist(), nd.FCLayerDist(4)]
    optimizer = nd.Adam(learning_rate=0.05, schedule=nd.StepDecay(every_epochs=1, factor=0.5))
    model = nd.ConvnetDist(layers, optimizer=optimizer, dtype="float64", seed=3)
    dataset = nd.Synthetic((6, 5, 1), train=11, test=4)
    dataset.open(grid)
    model.build(dataset.sample_shape, 3, grid)
    return model, dataset


def train(world, folder, last, shape, **fields):
    """Return the losses of a session that ends at step `last`, and its model."""
    grid = nd.ProcessGrid(world, **shape)
    model, dataset = build_layer_model(grid)
    losses = []
    session = nd.DistributedSession(
        nd.TaskSpecDef(),
        model,
        folder,
        [nd.StopAtStepHook(last)],
        log_step_count_steps=None,
        **fields,
    )
    with session:
        assert not session.should_stop() or session.global_step == last
        for x, y in session.batches(dataset, 3):
            losses.append(session.run(model.train_batch, x, y, batch_size=session.batch_size))
    assert session.global_step == last
    return losses, model


def train_and_collect(world, folder, last, shape, **fields):
    losses, model = train(world, folder, last, shape, **fields)
    return (
        losses,
        model.state(),
        {shard.full_name: array.copy() for shard, array in model.checkpoint_arrays()["optimizer"]},
    )


SHAPES = {1: {}, 2: {"rows": 2}, "replicas": {"replicas": 2}}
RANKS = {1: 1, 2: 2, "replicas": 2}
uninterrupted = {}


def run_on_ranks(kind, folder, last, **fields):
    return loopback.run(RANKS[kind], lambda world: train_and_collect(world, folder, last, SHAPES[kind], **fields))


@settings(max_examples=5, deadline=None)
@given(kind=st.sampled_from(list(SHAPES)), cuts=st.sets(st.integers(1, LAST - 1), min_size=1, max_size=2))
@pytest.mark.long
def test_layers_resume_at_any_step(tmp_path_factory, kind, cuts):
    if kind not in uninterrupted:
        uninterrupted[kind] = run_on_ranks(kind, None, LAST)
    folder = tmp_path_factory.mktemp("session")
    runs = [run_on_ranks(kind, folder, last) for last in [*sorted(cuts), LAST]]
    for rank, (losses, state, slots) in enumerate(uninterrupted[kind]):
        assert [loss for run in runs for loss in run[rank][0]] == losses
        for actual, expected in ((runs[-1][rank][1], state), (runs[-1][rank][2], slots)):
            assert actual.keys() == expected.keys() != set()
            assert all(np.array_equal(actual[name], expected[name]) for name in expected)
    shutil.rmtree(folder)


def test_experiment_and_session_resume_each_other(tmp_path, capsys):
    grid = nd.ProcessGrid.serial()

    def make_experiment():
        model, dataset = build_layer_model(grid)
        return nd.FitExperiment(dataset, model, batch_size=3, epochs=3)

    reference = make_experiment()
    reference.run(grid, hooks=[])
    train(grid.world, tmp_path, 6, {})
    resumed = make_experiment()
    result = resumed.run(grid, output=tmp_path, resume=True, hooks=[])
    assert [record["step"] for record in result.history] == [4, 8, 12]
    expected, actual = reference.model.state(), resumed.model.state()
    assert all(np.array_equal(actual[name], expected[name]) for name in expected)
    losses, _ = train(grid.world, tmp_path, 13, {})
    assert len(losses) == 1


def build_torch_parts(grid, kind):
    torch = pytest.importorskip("torch")
    import neondist.torch as ndt

    torch.manual_seed(5)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Dropout(0.3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(),
        torch.nn.Linear(40, 3),
    ).double()  # fmt: skip
    module = ndt.distribute(net, (4, 1, 5, 4), grid)
    if kind == "plain":
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    else:
        optimizer = ndt.DistributedOptimizer(module, torch.optim.Adam, kind, lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    return module, optimizer, scheduler


def train_torch(folder, last, kind, grid=None):
    torch = pytest.importorskip("torch")
    module, optimizer, scheduler = build_torch_parts(grid or nd.ProcessGrid.serial(), kind)

    def step(number):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 1, 5, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        y = module(module.scatter(x))
        target = torch.randint(3, (4,), generator=generator)
        loss = module.loss(torch.nn.functional.cross_entropy, y, module.scatter_target(target))
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    losses = []
    parts = [module, optimizer, scheduler] if kind == "plain" else [module, scheduler]
    hooks = [nd.StopAtStepHook(last)]
    with nd.DistributedSession(nd.TaskSpecDef(), parts, folder, hooks, log_step_count_steps=None) as session:
        while not session.should_stop():
            losses.append(session.run(step, session.global_step))
    return losses, optimizer.state_dict(), {name: tensor.clone() for name, tensor in module.state_dict().items()}


@settings(max_examples=2, deadline=None)
@given(kind=st.sampled_from(["AllReduce", "plain"]), cut=st.integers(1, 6))
@pytest.mark.long
def test_torch_modules_resume_at_any_step(tmp_path_factory, kind, cut):
    torch = pytest.importorskip("torch")
    if kind not in uninterrupted:
        uninterrupted[kind] = train_torch(None, 7, kind)
    folder = tmp_path_factory.mktemp("torch")
    first = train_torch(folder, cut, kind)
    losses, slots, state = train_torch(folder, 7, kind)
    assert first[0] + losses == uninterrupted[kind][0]
    assert all(torch.equal(state[name], tensor) for name, tensor in uninterrupted[kind][2].items())
    expected = uninterrupted[kind][1]
    assert slots["param_groups"] == expected["param_groups"]
    for index, slot in expected["state"].items():
        assert all(torch.equal(slots["state"][index][name], tensor) for name, tensor in slot.items())
    shutil.rmtree(folder)


TORCH_GRIDS = {1: {}, 2: {"rows": 2}, 4: {"rows": 2, "replicas": 2}}


def train_torch_on_ranks(ranks, folder, last, kind):
    """Return the losses and the state of the module on each rank."""

    def body(world):
        with closing(nd.ProcessGrid(world, **TORCH_GRIDS[ranks])) as grid:
            losses, _, state = train_torch(folder, last, kind, grid)
        return losses, {name: tensor.numpy() for name, tensor in state.items()}

    return loopback.run(ranks, body)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("AllReduce", (2, 4)), ("plain", (4, 2)), ("ShardedOptimizer", (2, 4)), ("ShardedOptimizer", (4, 2))],
    ids=str,
)
@pytest.mark.long
def test_torch_modules_resume_on_other_ranks(tmp_path, kind, counts):
    """Weights, slots, learning rate, dropout and running statistics equal those of one process, in float64."""
    cuts = [2 + 2 * i for i in range(len(counts))]
    runs = [train_torch_on_ranks(ranks, tmp_path, last, kind) for ranks, last in zip(counts, cuts, strict=True)]
    ((losses, state),) = train_torch_on_ranks(1, None, cuts[-1], kind)
    for rank, (_, actual) in enumerate(runs[-1]):
        actual_losses = [loss for run in runs for loss in run[min(rank, len(run) - 1)][0]]
        np.testing.assert_allclose(actual_losses, losses, rtol=1e-10)
        for name, array in state.items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


def test_checkpoint_of_other_objects_is_rejected(tmp_path):
    pytest.importorskip("torch")
    train_torch(tmp_path, 1, "AllReduce")
    module, _, _ = build_torch_parts(nd.ProcessGrid.serial(), "AllReduce")
    message = (
        r"states of \['MultiStepLR'\], .* has none; pass the same objects to .*saved, or give another checkpoint_dir"
    )
    with pytest.raises(nd.DataError, match=message):
        nd.DistributedSession(nd.TaskSpecDef(), module, tmp_path).__enter__()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it is not of type dict"),
        ('{"settings": {"momentum": "1"}, "states": [], "kinds": []}', "'momentum' is not a number"),
    ],
)
def test_invalid_session_entries_are_rejected(text, message):
    with pytest.raises(ValueError, match=f"^{message}; specify another checkpoint$"):
        create_session_state(build_layer_model(nd.ProcessGrid.serial())[0]).restore_checkpoint_texts({"session": text})


def test_epoch_loss_counts_each_sample_once():
    model, dataset = build_layer_model(nd.ProcessGrid.serial())
    with nd.DistributedSession(nd.TaskSpecDef(), model, log_step_count_steps=None) as session:
        losses = []
        for x, y in session.batches(dataset, 3):
            losses.append(session.run(model.train_batch, x, y, batch_size=session.batch_size))
            if len(losses) == 3:
                break
        assert session.state.totals.loss == pytest.approx(3 * sum(losses))
