"""Training loop on a toy model: order of samples, batches, hooks, records and schedules."""

import weakref
from itertools import chain

import numpy as np
import pytest
from toy_training import Recorder, ToyData, ToyModel, make_experiment

from neondist.comm import ProcessGrid
from neondist.costs import CrossEntropy
from neondist.data import Split
from neondist.layers import ConvLayerDist, FCLayerDist
from neondist.metrics import LogLoss, Misclassification
from neondist.optim import SGD, StepDecay
from neondist.train import evaluate, fit


def test_sample_order_depends_on_seed_and_epoch():
    model = ToyModel()
    fit(model, ToyData(train=10), epochs=2, batch_size=4)
    assert [len(batch) for batch in model.batches] == [4, 4, 2] * 2  # the smaller last batch is kept
    for epoch, batches in enumerate((model.batches[:3], model.batches[3:])):
        expected = np.random.Generator(np.random.PCG64([7, epoch])).permutation(10)
        assert list(chain(*batches)) == expected.tolist()
    assert list(chain(*model.target_batches)) == [int(i) % 3 for i in chain(*model.batches)]
    assert model.batches[:3] != model.batches[3:]


def test_seed_defaults_to_that_of_the_model():
    models = [ToyModel() for _ in range(3)]
    for model, seed in zip(models, (None, 7, 8), strict=True):
        fit(model, ToyData(), batch_size=4, seed=seed)
    assert models[0].batches == models[1].batches != models[2].batches


def test_records_have_mean_losses_and_metrics():
    model, data = ToyModel(), ToyData(train=10, test=7)
    losses = []

    class Losses(Recorder):
        def after_step(self, run):
            losses.append((run.loss, run.samples_seen))

    history = fit(model, data, 2, 4, [Losses()], metrics=[Misclassification(), LogLoss()])
    assert [r["epoch"] for r in history] == [1, 2]
    assert [r["step"] for r in history] == [3, 6]
    assert [samples for _, samples in losses] == [4, 8, 10] * 2
    weighted = sum(loss * n for (loss, _), n in zip(losses[:3], (4, 4, 2), strict=True)) / 10
    assert history[0]["train_loss"] == pytest.approx(weighted, rel=1e-14)
    assert [r["bytes_sent"] for r in history] == [100, 100]  # per epoch, not cumulative
    last, y = history[-1], model.fprop(data.test.images(np.arange(7), "float64"))
    labels = data.test.targets(np.arange(7))
    assert last["test_loss"] == last["log_loss"] == pytest.approx(CrossEntropy().local_sum(y, labels) / 7)
    assert last["test_error"] == (y.argmax(-1) != labels).mean()
    assert last["samples_per_second"] == pytest.approx(10 / last["seconds"])


def test_fields_of_the_default_record():
    assert list(fit(ToyModel(), ToyData())[0]) == [
        "epoch", "step", "train_loss", "test_loss", "test_error", "seconds", "samples_per_second", "bytes_sent",
        "bytes_summed"
    ]  # fmt: skip


def test_evaluation_is_independent_of_the_batch_size():
    results = [evaluate(ToyModel(), ToyData(test=7).test, size, [Misclassification()]) for size in (1, 3, 7, 100)]
    for result in results:
        assert result == pytest.approx(results[0])
    assert np.isnan(evaluate(ToyModel(), ToyData(test=0).test, 4)["loss"])


def test_evaluation_runs_in_inference_mode():
    model = ToyModel()
    fit(model, ToyData(train=4, test=4), 1, 2)
    assert model.training == [True, True, False, False]


def test_order_of_hook_calls():
    hook = Recorder()
    fit(ToyModel(), ToyData(train=4), 2, 2, [hook])
    assert hook.calls == [
        ("before_run", 0, 0),
        ("after_step", 0, 1), ("after_step", 0, 2), ("after_epoch", 1, 2),
        ("after_step", 1, 3), ("after_step", 1, 4), ("after_epoch", 2, 4),
        ("after_run", 2, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("failure", [("before_run", 0), ("after_step", 2), ("after_epoch", 2), ("after_run", 4)])
def test_all_hooks_receive_errors(failure):
    hooks = [Recorder(), Recorder(fail_at=failure), Recorder(fail_at=("on_error", failure[1])), Recorder()]
    with pytest.raises(RuntimeError, match="the hook fails"):
        fit(ToyModel(), ToyData(train=4), 2, 2, hooks)
    assert all(hook.calls[-1][0] == "on_error" for hook in hooks)
    assert not any(call[0] == "after_run" for call in hooks[3].calls)


def test_hooks_receive_interrupts():
    class Interrupt(Recorder):
        def after_step(self, run):
            raise KeyboardInterrupt

    hook = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        fit(ToyModel(), ToyData(), 1, 2, [hook])
    assert hook.calls[-1][0] == "on_error"


def test_continued_fit_matches_uninterrupted_fit():
    reference, first, second = ToyModel(), ToyModel(), ToyModel()
    expected = fit(reference, ToyData(), 3, 4)
    history = fit(first, ToyData(), 1, 4)
    second.load_state(first.state())
    second.step = first.step
    continued = fit(second, ToyData(), 3, 4, epoch=1, history=history)
    np.testing.assert_array_equal(reference.weights, second.weights)
    assert [r["train_loss"] for r in expected] == [r["train_loss"] for r in continued]
    assert [r["step"] for r in continued] == [3, 6, 9]


def test_schedule_receives_fractional_epochs():
    times = []

    class RecordingDecay(StepDecay):
        def factor(self, epoch):
            times.append(epoch)
            return super().factor(epoch)

    model = ToyModel(SGD(0.1, schedule=RecordingDecay(every_epochs=1, factor=0.5)))
    fit(model, ToyData(train=8), 2, 4)
    assert times == [0, 0.5, 1, 1.5]
    assert model.scales == [1, 1, 0.5, 0.5]


def test_images_are_freed_before_the_next_batch_is_read(monkeypatch):
    experiment = make_experiment(layers=lambda: [ConvLayerDist(2, 3, padding=1), FCLayerDist(4)])
    read, alive = [], []
    images = Split.images

    def record(*arguments):
        alive.append(sum(batch() is not None for batch in read))
        x = images(*arguments)
        read.append(weakref.ref(x))
        return x

    monkeypatch.setattr(Split, "images", record)
    experiment.run(ProcessGrid.serial(), hooks=[])
    assert alive == [0] * 2 * (5 + 2)  # batches of training and of evaluation, in two epochs
