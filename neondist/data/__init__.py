"""Data sets that give every rank its tile of each image and label map, and all other labels.

base: base class. split: samples and their targets. augment: random transforms. datasets: the data sets included in
neondist. records: readers of records. cache: tiles cached between runs. convert, split_source, chunks: conversion to
HDF5, its sources, and chunk shapes. csv_table, raw_values: label tables, and conversion of raw values.
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
