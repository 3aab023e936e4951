"""Settings of the tests of neondist.torch."""

from contextlib import contextmanager
from functools import cache

import pytest


@pytest.fixture(autouse=True, scope="session")
def operators_are_listed_once():
    """Of a small module torch.export spends half of its time on lists of PyTorch's operators, each time anew."""
    utils, name = pytest.importorskip("torch._export.utils"), "_collect_all_valid_cia_ops_for_namespace"
    programs, override = pytest.importorskip("torch.export.exported_program"), "_override_composite_implicit_decomp"
    fakes = pytest.importorskip("torch._subclasses.fake_impls")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(utils, name):  # they are PyTorch's own
            patch.setattr(utils, name, cache(getattr(utils, name)))
        if hasattr(programs, override) and hasattr(fakes, "op_implementations_dict"):
            patch.setattr(programs, override, remembering(getattr(programs, override), fakes.op_implementations_dict))
        yield


def remembering(override, fakes):
    """Return PyTorch's context of operators that stay whole; it makes thousands of kernels, here once."""
    made = {}

    @contextmanager
    def overridden(operators):
        key = frozenset((each, len(each.py_kernels), replacement) for each, replacement in operators.items())
        if key not in made:
            with override(operators):
                made[key] = [(each, each.py_kernels.copy(), fakes[each]) for each in operators]
                yield
            return
        before = [each.py_kernels for each, _, _ in made[key]]
        for each, kernels, fake in made[key]:
            each.py_kernels = kernels
            each._dispatch_cache.clear()
            fakes.setdefault(each, fake)
        try:
            yield
        finally:
            for (each, _, _), kernels in zip(made[key], before, strict=True):
                each.py_kernels = kernels
                each._dispatch_cache.clear()
                fakes.pop(each, None)

    return overridden
