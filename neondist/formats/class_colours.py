"""Colours of classes in pictures and label images."""

from __future__ import annotations

import colorsys


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Return RGB colours (0 to 255) of `count` classes: black, then hues a golden-ratio step apart."""
    hues = ((number * 0.618034) % 1 for number in range(count - 1))
    rgb = (colorsys.hsv_to_rgb(hue, 0.7, 0.95) for hue in hues)
    colours = [(0, 0, 0), *((round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in rgb)]
    return colours[:count]
