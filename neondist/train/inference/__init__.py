"""A trained network at work on images of any size.

predict: outputs of all of a file's images into another file, part by part, and on from where it was ended. images: a
file's images as the network takes them. network: a checkpoint's weights; of_weights: a module's, of a file. routes:
block by block, or whole; windows: a classifier of tiles at each place. results: what is written. progress: how far it
is. measure: cost and metrics over files, instead of outputs. forecast: fields some times later, each from the
one before.
"""

from .forecast import forecast
from .measure import evaluate_files, evaluate_module
from .of_weights import TrainedModule
from .predict import predict, predict_module

__all__ = ["TrainedModule", "evaluate_files", "evaluate_module", "forecast", "predict", "predict_module"]
