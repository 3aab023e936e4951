"""Endless experiment with a checkpoint after each step, for jobs that are killed."""

ENDLESS_YAML = """
!FitExperiment
backend: numpy
dtype: float64
dataset: !Synthetic {shape: [9, 8, 2], classes: 4, train: 25, test: 5}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 3, kernel_size: 3, padding: 1, activation: !ReLU {}}
    - !BatchNormLayerDist {}
    - !LocalFilteringLayerDist {out_channels: 3, kernel_size: 2}
    - !DropoutLayerDist {rate: 0.2}
    - !FCLayerDist {out_features: 4}
  optimizer: !Adam {learning_rate: 0.01}
batch_size: 10
epochs: 1000000
checkpoint: {every_steps: 1, keep: 2}
"""
