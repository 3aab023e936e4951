"""Data sets that hand every rank its own tile of each image, and the labels whole.

base: what a data set is, and its splits. datasets: those that come with neondist. cache: what they keep between runs.
convert: other files to HDF5. image_loader: one image file to an array. split_source, chunks: samples on their way
into a file, and from it. sources, predictions: images to predict for, and the file of the results.
"""

from .base import Dataset, Split
from .datasets.cifar10 import CIFAR10
from .datasets.hdf5 import HDF5Dataset
from .datasets.mnist import MNIST
from .datasets.photographs import Photographs
from .datasets.synthetic import Synthetic

__all__ = ["CIFAR10", "MNIST", "Dataset", "HDF5Dataset", "Photographs", "Split", "Synthetic"]
