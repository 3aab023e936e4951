"""Templates of the experiment files that `neondist init` writes."""

from __future__ import annotations

EXPERIMENT_TEMPLATE = """\
# {task}
# neondist's docs/reference.md lists all fields; with `neondist schema`, an editor completes and checks them.
!FitExperiment
dataset: {dataset}
augment: [!Flip {{}}]      # remove transforms that change the meaning of an image
model: !ConvnetDist
  layers:
{layers}
  cost: {cost}
  optimizer: !AdamW
    learning_rate: 0.001
    decay_all: false       # no weight decay for biases and norms
    schedule: !Warmup {{epochs: 1, then: !CosineDecay {{epochs: 29}}}}  # the two must add up to `epochs` below
batch_size: 16
epochs: 30
metrics: [{metrics}]
best: {best}
"""
FORECAST_TEMPLATE = """\
# Forecasts each time step from the two preceding time steps. `neondist predict --steps` computes longer forecasts.
# neondist's docs/climate.md explains the fields; with `neondist schema`, an editor completes and checks them.
!FitExperiment
dataset: !ClimateFiles
  files: {files}
  variables: [{variables}]
  steps: 2               # consecutive times in an image
  lead: 1                # time steps from the last of them to the target
  validation: 0.1
  test: 0.1
model: !ConvnetDist
  layers:                # {padding_comment}
    - !ConvLayerDist {{out_channels: 24, kernel_size: 5, padding: 2, padding_mode: {padding}, activation: !ReLU {{}}}}
    - !ConvLayerDist {{out_channels: 24, kernel_size: 5, padding: 2, padding_mode: {padding}, activation: !ReLU {{}}}}
    - !ConvLayerDist {{out_channels: {outputs}, kernel_size: 1}}
  cost: !MSE {{{weights}}}
  optimizer: !Adam {{learning_rate: 0.001}}
batch_size: 8
epochs: 20
metrics: [!RMSE {{{weights}}}, !ACC {{{weights}}}]
best: !Best {{number: validation_loss, patience: 5}}  # keeps checkpoint_best.h5; early stopping
"""
CLASS_METRICS, SEGMENTATION_METRICS = "!Accuracy {}, !F1 {}, !ConfusionMatrix {}", "!IoU {}, !F1 {}"
_CONV_BLOCK_TEMPLATE = """\
    - !ConvLayerDist {{out_channels: {0}, kernel_size: 3, padding: 1, bias: false}}
    - !BatchNormLayerDist {{}}
    - !ActivationLayerDist {{activation: !ReLU {{}}}}"""
_POOLING_LAYER = "    - !MaxPoolingLayerDist {kernel_size: 2}"


def classifier_layers(extent: int, outputs: int) -> str:
    """Return the layers of a classifier; `extent`, of the shortest axis, limits the number of pooling layers."""
    layers = [_CONV_BLOCK_TEMPLATE.format(channels) for channels in (16, 32, 64)]
    layers = [f"{layer}\n{_POOLING_LAYER}" if extent >> at > 1 else layer for at, layer in enumerate(layers)]
    head_layers = f"    - !GlobalAvgPoolingLayerDist {{}}\n    - !FCLayerDist {{out_features: {outputs}}}"
    return "\n".join([*layers, head_layers])


def segmenter_layers(outputs: int) -> str:
    """Return the layers of a segmentation network, whose output has the extent of its input."""
    layers = [_CONV_BLOCK_TEMPLATE.format(channels) for channels in (16, 16, 32)]
    return "\n".join([*layers, f"    - !ConvLayerDist {{out_channels: {outputs}, kernel_size: 1}}"])
