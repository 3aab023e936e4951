"""Readers and writers of image files: readers return any box of an array, and many ranks write a file box by box.

base: abstract sources and sinks. axes: conversion between the axis order of a file and channels-last. cache: decoded
chunks. draft: sinks that write to a temporary name until the file is complete. in_place: sinks of uncompressed cells,
which every rank writes in place. tiles: default chunk sizes. table: file types and their classes; `open_source` and
`create_sink` choose by suffix. Each format has its own module, built on a maintained library. conventions, coordinates,
cf_time: NetCDF metadata. tiff_tags, ome: position, time and calibration of images.
"""

from .base import TileSink, TileSource
from .draft import DraftSink
from .table import Format, create_sink, open_source

__all__ = ["DraftSink", "Format", "TileSink", "TileSource", "create_sink", "open_source"]
