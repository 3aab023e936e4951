"""Images of any size that a network can learn, made on demand from their global indices."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from ..comm import ProcessGrid
from ..errors import ConfigError
from .base import Dataset, Split, tile_slices
from .gratings import Gratings
from .room import require_room

_MOST = 1 << 48  # beyond it, products of extents leave what NumPy can index

_KEPT = 40  # bytes of a sample: its label and phase, its place in the order


class Synthetic(Dataset):
    """Gratings, one direction and wavelength per class, with a random phase per sample and noise in every cell.

    Every cell is a pure function of (seed, split, sample, global cell index): each rank makes only its tile, when a
    batch asks for it, and all grids see the same numbers, bit for bit.

    Parameters
    ----------
    shape : sequence of int
        Global shape of a sample, (H, W, C) or (*spatial, C) with one spatial axis or more.
    classes : int
        Number of classes; sample i is of class i modulo `classes`.
    train, test : int
        Number of samples of each split.
    seed : int
        Another seed gives other phases and other noise of the same classes.
    noise : float
        Half width of the uniform noise; the gratings themselves reach from -1 to 1.
    validation : float or int, optional
        A fraction, or a number, of the training samples, kept for validation: the last ones.

    Raises
    ------
    ConfigError
        If an argument is of the wrong type or out of range.
    """

    classes: int

    def __init__(
        self,
        shape: Sequence[int] = (256, 256, 3),
        classes: int = 4,
        train: int = 256,
        test: int = 64,
        seed: int = 0,
        noise: float = 1.0,
        validation: float | int | None = None,
    ) -> None:
        super().__init__(validation)
        if not isinstance(shape, (list, tuple)) or len(shape) < 2:
            raise ConfigError(f"shape: {shape!r} is not a list of extents; give [H, W, C] or [*spatial, C]")
        if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < float("inf"):
            raise ConfigError(f"noise: {noise!r} is not a number from 0; give one, for instance 1.0")
        self.sample_shape = tuple(_integer("shape", extent, 1) for extent in shape)
        self.classes = _integer("classes", classes, 2)
        self.counts = {"train": _integer("train", train, 1), "test": _integer("test", test, 1)}
        self.seed, self.noise = _integer("seed", seed, 0), float(noise)

    def check(self) -> None:
        """Check that there is memory for what is kept of each sample; the constructor has checked the arguments."""
        count = sum(self.counts.values())
        require_room(_KEPT * count, f"what is kept of {count} samples", "give fewer for train and test")

    def load(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Return the splits that make this rank's tile on demand."""
        box = tile_slices(grid, self.sample_shape)
        tiles = {
            name: Gratings(self.sample_shape, box, self.classes, count, (self.seed, name), self.noise)
            for name, count in self.counts.items()
        }
        train, test = (Split(made, made.labels, scale=1.0) for made in tiles.values())
        return train, test


def _integer(field: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= _MOST:
        raise ConfigError(f"{field}: {value!r} is not a whole number from {least} to {_MOST}; give one")
    return int(value)
