"""Runs of `neondist data convert`, and the datasets that they write."""

import numpy as np
from fuzz import classify_command

import neondist as nd


def convert(folder, *words):
    """Convert to out.h5 in a folder; return the outcome of the command."""
    return classify_command("data", "convert", *words, "--to", folder / "out.h5")


def convert_and_open(folder, *words):
    """Convert to out.h5 in a folder; return the opened dataset, and the raw images and labels of both splits."""
    outcome = convert(folder, *words)
    assert outcome == "fine", outcome
    data = nd.HDF5Dataset(folder / "out.h5", mean=0, std=1, scale=1)
    data.open(nd.ProcessGrid.serial())
    splits = ((split, np.arange(len(split))) for split in (data.train, data.test))
    return data, [(split.images(indices, "float64"), split.targets(indices)) for split, indices in splits]
