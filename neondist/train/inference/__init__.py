"""Inference with a trained network on images of any size.

predict: outputs for a file's images, written part by part and resumable. images: input images of a file.
checkpoint_prediction: a network with a checkpoint's weights; trained_module: a PyTorch module with weights of a file.
prediction_methods: block by block, or whole images; window_prediction: tile classifiers. output_kinds: conversion of
outputs. record_prediction: outputs for records. file_evaluation: cost and metrics over files. forecast: forecasts.
"""

from .file_evaluation import evaluate_files, evaluate_module
from .forecast import forecast
from .predict import predict, predict_module
from .trained_module import TrainedModule

__all__ = ["TrainedModule", "evaluate_files", "evaluate_module", "forecast", "predict", "predict_module"]
