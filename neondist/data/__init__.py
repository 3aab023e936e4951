"""Data sets that hand every rank its own tile of each image, and the labels whole.

base: what a data set is, and its splits. datasets: those that come with neondist. cache: what they keep between runs.
convert: other files to HDF5. split_source, chunks: samples on their way into a file, and from it.
"""

from .base import Dataset, Split
from .datasets.cifar10 import CIFAR10
from .datasets.hdf5 import HDF5Dataset
from .datasets.image_files import ImageFiles
from .datasets.mnist import MNIST
from .datasets.photographs import Photographs
from .datasets.synthetic import Synthetic

__all__ = ["CIFAR10", "MNIST", "Dataset", "HDF5Dataset", "ImageFiles", "Photographs", "Split", "Synthetic"]
