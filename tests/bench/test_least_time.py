"""Least times of training steps, from which benchmarks estimate how long they take."""

import pytest

from neondist.bench.least_time import MAX_SAVED_PRODUCTS, CoreSpeed
from neondist.bench.model.predict import count_rank_profiles, profile_with_progress
from neondist.bench.schemes import RunProgressReporter
from neondist.config import load_experiment
from neondist.geometry import GridShape

EXPERIMENT = """!FitExperiment
dist_flag: true
dataset: !Synthetic {shape: [64, 64, 1], classes: 2, train: 4, test: 1}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 8, kernel_size: 3, padding: 1}
    - !GlobalAvgPoolingLayerDist {}
    - !FCLayerDist {out_features: 2}
  cost: !CrossEntropy {}
  optimizer: !SGD {learning_rate: 0.01}
batch_size: 4
epochs: 1
"""


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    return load_experiment(tmp_path / "e.yaml")


def test_step_time_is_bounded_by_products_or_memory(experiment):
    flops = 2 * 4 * (2 * 64 * 64 * 9 * 8 + 3 * 8 * 2)  # the image needs no gradient
    assert CoreSpeed(1e6, 1e30).step_seconds_lower_bound(experiment, 1) == pytest.approx(
        flops / 1e6 / MAX_SAVED_PRODUCTS
    )
    by_memory = [CoreSpeed(1e30, 1e6).step_seconds_lower_bound(experiment, ranks) for ranks in (1, 2)]
    assert by_memory[0] > by_memory[1] > 0
    assert CoreSpeed(1e30, 1e6).step_seconds_lower_bound(experiment, 2, cores=8) == by_memory[1] / 4


def test_speed_of_this_process():
    speed = CoreSpeed.measure()
    assert speed.flops > 1e8
    assert speed.bandwidth > 1e7


def test_plan_and_fraction_of_a_training_run(experiment):
    """Expect the fraction after each step of two epochs, and all runs planned by their steps."""
    events = []

    class Progress:
        def change_parts(self, total, planned_seconds):
            events.append((total, planned_seconds))

        def set_part_fraction(self, fraction):
            events.append(fraction)

    experiment.batch_size, experiment.epochs = 2, 2
    experiment.run(hooks=[RunProgressReporter(Progress(), 3, 0.5)])
    assert events == [(3, [2.0] * 3), 0.25, 0.5, 0.75, 1.0]


def test_fraction_of_a_prediction(experiment):
    fractions = []

    class Progress:
        def set_part_fraction(self, fraction):
            fractions.append(fraction)

    assert count_rank_profiles(1, experiment) == 1
    assert count_rank_profiles(2, experiment) == 4  # 1 x 2, 2 x 1, two replicas, and the fastest of them again
    profile = profile_with_progress(Progress(), 2)
    for _ in range(2):
        profile(experiment, GridShape(), 1e-4)
    assert fractions == sorted(fractions)
    assert fractions[0] == pytest.approx(1 / 10)
    assert fractions[-1] == 1
