"""Data sets that hand every rank its own tile of each image, and the labels whole.

base: what a data set is, and its splits. mnist, idx: the official MNIST files. cifar10, cifar10_files: the official
binary batches. cache: what both keep between runs. synthetic: images of any size, made on demand. photographs: crops of
natural photographs. hdf5, hdf5_source, hdf5_tiles: images of any size that stay in an HDF5 file; convert and what it
imports make such files. download: the MNIST files from their public mirror (imported by the command line only).
"""

from .base import Dataset, Split
from .cifar10 import CIFAR10
from .hdf5 import HDF5Dataset
from .mnist import MNIST
from .photographs import Photographs
from .synthetic import Synthetic

__all__ = ["CIFAR10", "MNIST", "Dataset", "HDF5Dataset", "Photographs", "Split", "Synthetic"]
