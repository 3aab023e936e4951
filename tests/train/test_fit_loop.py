"""The training loop, on a toy model: order, batches, hooks, records, schedules."""

from itertools import chain

import numpy as np
import pytest
from session_toys import Recorder, ToyData, ToyModel

from neondist.costs import CrossEntropy
from neondist.metrics import LogLoss, Misclassification
from neondist.optim import SGD, StepDecay
from neondist.train import evaluate, fit


def test_order_of_samples_is_that_of_seed_and_epoch():
    model = ToyModel()
    fit(model, ToyData(train=10), epochs=2, batch_size=4)
    assert [len(batch) for batch in model.seen] == [4, 4, 2] * 2  # the last batch is kept, though it is smaller
    for epoch, batches in enumerate((model.seen[:3], model.seen[3:])):
        expected = np.random.Generator(np.random.PCG64([7, epoch])).permutation(10)
        assert list(chain(*batches)) == expected.tolist()
    assert list(chain(*model.targets_seen)) == [int(i) % 3 for i in chain(*model.seen)]
    assert model.seen[:3] != model.seen[3:]


def test_seed_is_the_models_unless_given():
    models = [ToyModel() for _ in range(3)]
    for model, seed in zip(models, (None, 7, 8), strict=True):
        fit(model, ToyData(), batch_size=4, seed=seed)
    assert models[0].seen == models[1].seen != models[2].seen


def test_records():
    model, data = ToyModel(), ToyData(train=10, test=7)
    losses = []

    class Losses(Recorder):
        def after_step(self, run):
            losses.append((run.loss, run.samples_seen))

    history = fit(model, data, 2, 4, [Losses()], metrics=[Misclassification(), LogLoss()])
    assert [r["epoch"] for r in history] == [1, 2]
    assert [r["step"] for r in history] == [3, 6]
    assert [seen for _, seen in losses] == [4, 8, 10] * 2
    weighted = sum(loss * n for (loss, _), n in zip(losses[:3], (4, 4, 2), strict=True)) / 10
    assert history[0]["train_loss"] == pytest.approx(weighted, rel=1e-14)
    assert [r["bytes_sent"] for r in history] == [100, 100]  # of the epoch, not since the start
    last, y = history[-1], model.fprop(data.test.images(np.arange(7), "float64"))
    labels = data.test.targets(np.arange(7))
    assert last["test_loss"] == last["log_loss"] == pytest.approx(CrossEntropy().value(y, labels) / 7)
    assert last["test_error"] == (y.argmax(-1) != labels).mean()
    assert last["samples_per_second"] == pytest.approx(10 / last["seconds"])


def test_the_default_record_has_exactly_these_fields():
    assert list(fit(ToyModel(), ToyData())[0]) == [
        "epoch", "step", "train_loss", "test_loss", "test_error", "seconds", "samples_per_second", "bytes_sent",
        "bytes_summed"
    ]  # fmt: skip


def test_evaluate_does_not_depend_on_the_batch_size():
    results = [evaluate(ToyModel(), ToyData(test=7).test, size, [Misclassification()]) for size in (1, 3, 7, 100)]
    for result in results:
        assert result == pytest.approx(results[0])
    assert np.isnan(evaluate(ToyModel(), ToyData(test=0).test, 4)["loss"])


def test_evaluation_is_no_training():
    model = ToyModel()
    fit(model, ToyData(train=4, test=4), 1, 2)
    assert model.training == [True, True, False, False]


def test_hooks_in_order():
    hook = Recorder()
    fit(ToyModel(), ToyData(train=4), 2, 2, [hook])
    assert hook.calls == [
        ("before_run", 0, 0),
        ("after_step", 0, 1), ("after_step", 0, 2), ("after_epoch", 1, 2),
        ("after_step", 1, 3), ("after_step", 1, 4), ("after_epoch", 2, 4),
        ("after_run", 2, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("where", [("before_run", 0), ("after_step", 2), ("after_epoch", 2), ("after_run", 4)])
def test_every_hook_hears_of_an_error(where):
    hooks = [Recorder(), Recorder(fail_at=where), Recorder(fail_at=("on_error", where[1])), Recorder()]
    with pytest.raises(RuntimeError, match="the hook fails"):
        fit(ToyModel(), ToyData(train=4), 2, 2, hooks)
    assert all(hook.calls[-1][0] == "on_error" for hook in hooks)
    assert not any(call[0] == "after_run" for call in hooks[3].calls)


def test_interrupt_reaches_the_hooks():
    class Interrupt(Recorder):
        def after_step(self, run):
            raise KeyboardInterrupt

    hook = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        fit(ToyModel(), ToyData(), 1, 2, [hook])
    assert hook.calls[-1][0] == "on_error"


def test_continuing_is_the_same_as_not_stopping():
    whole, first, second = ToyModel(), ToyModel(), ToyModel()
    complete = fit(whole, ToyData(), 3, 4)
    begun = fit(first, ToyData(), 1, 4)
    second.load_state(first.state())
    second.step = first.step
    continued = fit(second, ToyData(), 3, 4, epoch=1, history=begun)
    np.testing.assert_array_equal(whole.weights, second.weights)
    assert [r["train_loss"] for r in complete] == [r["train_loss"] for r in continued]
    assert [r["step"] for r in continued] == [3, 6, 9]


def test_schedule_is_given_the_time_in_epochs():
    times = []

    class Spy(StepDecay):
        def factor(self, epoch):
            times.append(epoch)
            return super().factor(epoch)

    model = ToyModel(SGD(0.1, schedule=Spy(every_epochs=1, factor=0.5)))
    fit(model, ToyData(train=8), 2, 4)
    assert times == [0, 0.5, 1, 1.5]
    assert model.scales == [1, 1, 0.5, 0.5]
