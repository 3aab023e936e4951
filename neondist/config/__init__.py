"""YAML files to experiments, and back.

parse → `tree` of nodes that know their line → `overrides` from the command line → `build`: each tag's class, its fields
`fit` to the constructor's type hints. Nothing outside the registry can be made, and every error says FILE:LINE.
"""

from .dump import dump
from .load import load_experiment
from .source import locate, place

__all__ = ["dump", "load_experiment", "locate", "place"]
