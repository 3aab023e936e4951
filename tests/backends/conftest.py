"""What tests of compiled kernels share."""

import pytest

from neondist.backends.host import HostKernels


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request):
    """Kernels of one thread, and of two."""
    found = HostKernels()
    if request.param > 1:
        pytest.importorskip("torch", reason="its threads are used")
        from neondist.backends.torch import _gomp_parallel

        found.threads, found.start = request.param, _gomp_parallel()
    return found
