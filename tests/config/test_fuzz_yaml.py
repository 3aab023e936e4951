"""Mutated experiment files: each is rejected with one message, or trains."""

import contextlib

import pytest
from fuzz import check_outcomes, classify_call, classify_command, run_isolated
from fuzz_yaml import BILLION_LAUGHS, PAYLOAD, mutate_texts

import neondist as nd
from neondist.config import load_experiment

TEXTS = [
    """\
!FitExperiment
dataset: !Synthetic {shape: [13, 9, 2], classes: 3, train: 12, test: 6, seed: 1, noise: 0.5}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 3, kernel_size: [3, 2], stride: 1, padding: [[1, 0], [1, 1]]}
    - !ActivationLayerDist {activation: !ReLU {}}
    - !MaxPoolingLayerDist {kernel_size: 2, padding: 0, name: pool}
    - !BatchNormLayerDist {momentum: 0.1, eps: 1e-5}
    - !FCLayerDist {out_features: 3, bias: true}
  cost: !CrossEntropy {}
  optimizer: !SGD {learning_rate: 1e-2, momentum: 0.9}
batch_size: 4
epochs: 1
grid: {replicas: 1, rows: 1}
dtype: float64
backend: numpy
seed: 7
metrics: [!TopK {k: 2}]
""",
    """\
!FitExperiment {
dist_flag: false, backend: numpy, batch_size: 4, epochs: 1, seed: 0,
dataset: !Synthetic {shape: [8, 8, 1], classes: 2, train: 8, test: 4},
model: !Convnet {
  cost: !SoftmaxCrossEntropy {}, optimizer: !Adam {learning_rate: 0.001, beta1: 0.9, eps: 1e-8},
  layers: [
    &conv !ConvLayer {out_channels: 2, kernel_size: 3, padding: same, activation: !Tanh {}},
    !Sum {layers: [[!ConvLayer {out_channels: 2, kernel_size: 1}], []]}, *conv,
    !Concat {layers: [!Sequential {layers: [!AvgPoolingLayer {kernel_size: 3, stride: 1, padding: 1}]}, []]},
    !DropoutLayer {rate: 0.5}, !UpsampleLayer {factor: 2}, !LCNLayer {}, !GlobalAvgPoolingLayer {},
    !FCLayer {out_features: 2}]}}
""",
    """\
!FitExperiment
dataset: !MNIST {serialized_path: 'cache/mnist_{rank}_of_{size}.h5'}
model: !MLPDist {layers: [!FCLayerDist {out_features: 10}]}
batch_size: 16
epochs: 1
backend: numpy
""",
]  # fmt: skip


class _Trained(Exception):
    pass


class _StopAfterOneStep(nd.Hook):
    def after_step(self, run):
        raise _Trained


def train_one_step(path):
    with contextlib.suppress(_Trained):
        load_experiment(path).run(nd.ProcessGrid.serial(), hooks=[_StopAfterOneStep()])


@pytest.mark.long
def test_mutated_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def attempt(text):
        with open("case.yaml", "w", encoding="utf-8") as file:
            file.write(text)
        result = classify_command("check", "case.yaml")
        return classify_call(lambda: train_one_step("case.yaml")) if result == "fine" else result

    cases = [*TEXTS, *mutate_texts(TEXTS, 150), TEXTS[0] + BILLION_LAUGHS]
    outcomes = run_isolated(cases, attempt)
    names = [path.name for path in tmp_path.rglob("*")]
    assert PAYLOAD not in names
    check_outcomes(outcomes, 75)
    assert outcomes[: len(TEXTS)] == ["fine"] * len(TEXTS)
    assert "aliases expand" in outcomes[-1]
