"""Settings of the tests of neondist.torch."""

from functools import cache

import pytest


@pytest.fixture(autouse=True, scope="session")
def operators_are_listed_once():
    """Of a small module torch.export spends half of its time on listing PyTorch's operators, each time anew."""
    utils, name = pytest.importorskip("torch._export.utils"), "_collect_all_valid_cia_ops_for_namespace"
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(utils, name):  # it is PyTorch's own
            patch.setattr(utils, name, cache(getattr(utils, name)))
        yield
