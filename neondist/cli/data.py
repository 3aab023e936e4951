"""`neondist data`: download a data set."""

from __future__ import annotations

import argparse


def data(arguments: argparse.Namespace) -> int:
    """Download the files, with a progress bar, and name them."""
    from ..datasets.download import console_progress, download_mnist

    mirror = {} if arguments.mirror is None else {"mirror": arguments.mirror}
    with console_progress() as progress:
        files = download_mnist(arguments.to, progress=progress, **mirror)
    for file in files:
        print(file)
    print(f"use them with dataset: !MNIST {{path: {arguments.to}}}")
    return 0
