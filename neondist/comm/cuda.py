"""Support of the MPI library for addresses of a GPU's memory: as it reports it, and as a message proves it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA of MPICH"""


def says_cuda(mpi: Any) -> bool | None:
    """Return whether the library that mpi4py has started says that it takes them; None: it has no call that tells.

    Open MPI and MVAPICH have one call for that, MPICH another.
    """
    library, answer = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        return not library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer)) and bool(answer.value)
    return None


def is_proven(comm: Any, array: Any) -> bool:
    """Return whether this rank's message to itself, from one half of a device's array to the other, arrives.

    Parameters
    ----------
    array : (2 n,) of a device
    """
    half = len(array) // 2
    array[:half], array[half:] = 1, 0
    array.get()  # both are done
    try:
        comm.Sendrecv(array[:half], comm.Get_rank(), 0, array[half:], comm.Get_rank(), 0)
    except Exception:  # mpi4py's, or the library's through it
        return False
    return bool(np.all(array.get() == 1))
