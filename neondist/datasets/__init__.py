"""Data sets that hand every rank its own tile of each image, and the labels whole.

base: what a data set is. idx, unpack, mnist_files, mnist: the official MNIST files. cifar10, cifar10_files: the
official binary batches. gratings, synthetic: images of any size, made on demand. cache, cache_path: this rank's tile in
an HDF5 file. photographs, photograph_files, whitening: natural
photographs. download: the MNIST files from their public mirror (imported by the command line only).
"""

from .base import Dataset, Split
from .cifar10 import CIFAR10
from .mnist import MNIST
from .photographs import Photographs
from .synthetic import Synthetic

__all__ = ["CIFAR10", "MNIST", "Dataset", "Photographs", "Split", "Synthetic"]
