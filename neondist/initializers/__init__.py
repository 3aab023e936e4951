"""Initialisers of parameters."""

from .base import Initializer
from .rules import Constant, FanInNormal, FanInUniform, Gaussian, GlorotUniform, Uniform

__all__ = ["Constant", "FanInNormal", "FanInUniform", "Gaussian", "GlorotUniform", "Initializer", "Uniform"]
