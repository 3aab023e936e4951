"""Inference with a trained network on images of any size.

predict: outputs for a file's images, written part by part and resumable. images: input images of a file. network: with
a checkpoint's weights; trained_module: a PyTorch module with weights of a file. methods: block by block, or whole
images; windows: tile classifiers. results: conversion of outputs. progress: progress line. file_evaluation: cost and
metrics over files. forecast: fields at later times.
"""

from .file_evaluation import evaluate_files, evaluate_module
from .forecast import forecast
from .predict import predict, predict_module
from .trained_module import TrainedModule

__all__ = ["TrainedModule", "evaluate_files", "evaluate_module", "forecast", "predict", "predict_module"]
