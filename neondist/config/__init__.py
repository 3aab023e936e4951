"""Loading of experiments from YAML files, and serialisation to YAML.

parse → tree of nodes with line numbers → `overrides` from the command line → `build`: each tag's class, its fields
converted to the constructor's type hints. Only registered classes are instantiated; errors include FILE:LINE.
"""

from .dump import dump
from .load import load_experiment
from .source import add_location, describe_yaml_location

__all__ = ["add_location", "describe_yaml_location", "dump", "load_experiment"]
