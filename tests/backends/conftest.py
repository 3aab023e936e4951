"""Fixtures for tests of compiled kernels."""

import pytest

from neondist.backends.gomp import gomp_parallel_address
from neondist.backends.host import HostKernels


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request):
    """Compiled kernels with one and with two threads."""
    host_kernels = HostKernels()
    host_kernels.threads, host_kernels.gomp_address = 1, 0
    if request.param > 1:
        host_kernels.threads, host_kernels.gomp_address = request.param, gomp_parallel_address()
        if not host_kernels.gomp_address:
            pytest.skip("requires libgomp")
    return host_kernels
