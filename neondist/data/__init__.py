"""Data sets that hand every rank its own tile of each image, and the labels whole.

base: a data set. split: its samples and their targets. datasets: those that come with neondist. cache: what they keep
between runs. convert: other files to HDF5. split_source, chunks: samples on their way into a file, and from it.
"""

from .base import Dataset
from .datasets.cifar10 import CIFAR10
from .datasets.climate_files import ClimateFiles
from .datasets.hdf5 import HDF5Dataset
from .datasets.image_files import ImageFiles
from .datasets.mnist import MNIST
from .datasets.photographs import Photographs
from .datasets.synthetic import Synthetic
from .split import Split

__all__ = [
    "CIFAR10",
    "MNIST",
    "ClimateFiles",
    "Dataset",
    "HDF5Dataset",
    "ImageFiles",
    "Photographs",
    "Split",
    "Synthetic",
]
