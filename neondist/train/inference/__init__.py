"""A trained network at work on images of any size.

predict: outputs of all of a file's images into another file, part by part, and on from where it was ended. images: a
file's images as the network takes them. network: its weights. routes: block by block, or whole. results: what is
written. progress: how far it is. measure: cost and metrics over files, instead of outputs.
"""

from .measure import evaluate_files
from .predict import predict

__all__ = ["evaluate_files", "predict"]
