"""Fixtures of models."""

import pytest
from every_layer import build_every_layer, run_steps


@pytest.fixture(scope="session")
def every_layer_steps():
    """Results of two steps of every layer in one process."""
    return run_steps(build_every_layer(batch=8))
