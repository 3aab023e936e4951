"""Inference with a trained network on images of any size.

predict: outputs for a file's images, written part by part and resumable. images: input images of a file. network: with
a checkpoint's weights; of_weights: a PyTorch module with weights of a file. routes: block by block, or whole images;
windows: tile classifiers. results: conversion of outputs. progress: progress line. measure: cost and metrics over
files. forecast: fields at later times.
"""

from .forecast import forecast
from .measure import evaluate_files, evaluate_module
from .of_weights import TrainedModule
from .predict import predict, predict_module

__all__ = ["TrainedModule", "evaluate_files", "evaluate_module", "forecast", "predict", "predict_module"]
