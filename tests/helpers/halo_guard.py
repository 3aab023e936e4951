"""Halo checks of `--debug-halo` on a model."""

import neondist as nd


def guard(model):
    """Enable halo checks on a built model, and return it."""
    nd.DebugHalo().guard(model)
    return model
