"""Fixtures for the tests of neondist.torch."""

from contextlib import contextmanager
from functools import cache

import pytest


@pytest.fixture(autouse=True, scope="session")
def cached_operator_lists():
    """Cache the operator lists that torch.export rebuilds on every call; that is half its time for small modules."""
    utils, name = pytest.importorskip("torch._export.utils"), "_collect_all_valid_cia_ops_for_namespace"
    programs, override = pytest.importorskip("torch.export.exported_program"), "_override_composite_implicit_decomp"
    fake_impls = pytest.importorskip("torch._subclasses.fake_impls")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(utils, name):  # private API of PyTorch
            patch.setattr(utils, name, cache(getattr(utils, name)))
        if hasattr(programs, override) and hasattr(fake_impls, "op_implementations_dict"):
            patch.setattr(
                programs, override, cached_override(getattr(programs, override), fake_impls.op_implementations_dict)
            )
        yield


def cached_override(override, fake_impls):
    """Return PyTorch's context manager for operators that are not decomposed, with its thousands of kernels cached."""
    cache_by_operators = {}

    @contextmanager
    def cached_context(operators):
        key = frozenset(
            (operator, len(operator.py_kernels), replacement) for operator, replacement in operators.items()
        )
        if key not in cache_by_operators:
            with override(operators):
                cache_by_operators[key] = [
                    (operator, operator.py_kernels.copy(), fake_impls[operator]) for operator in operators
                ]
                yield
            return
        original_kernels = [operator.py_kernels for operator, _, _ in cache_by_operators[key]]
        for operator, kernels, fake_impl in cache_by_operators[key]:
            operator.py_kernels = kernels
            operator._dispatch_cache.clear()
            fake_impls.setdefault(operator, fake_impl)
        try:
            yield
        finally:
            for (operator, _, _), kernels in zip(cache_by_operators[key], original_kernels, strict=True):
                operator.py_kernels = kernels
                operator._dispatch_cache.clear()
                fake_impls.pop(operator, None)

    return cached_context
