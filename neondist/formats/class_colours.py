"""Colours of classes in pictures and label images."""

from __future__ import annotations

import colorsys


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Return red, green and blue (0 to 255) of so many classes: black, and then hues far from those before them."""
    turns = ((number * 0.618034) % 1 for number in range(count - 1))
    hues = (colorsys.hsv_to_rgb(turn, 0.7, 0.95) for turn in turns)
    found = [(0, 0, 0), *((round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in hues)]
    return found[:count]
