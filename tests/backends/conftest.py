"""Fixtures for tests of compiled kernels."""

import pytest

from neondist.backends.gomp import gomp_parallel
from neondist.backends.host import HostKernels


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request):
    """Kernels of one thread, and of two."""
    found = HostKernels()
    found.threads, found.start = 1, 0
    if request.param > 1:
        found.threads, found.start = request.param, gomp_parallel()
        if not found.start:
            pytest.skip("no libgomp, whose threads are used")
    return found
