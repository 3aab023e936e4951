"""Checks for GPU memory support in the MPI library: its own report, and a test message."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_MPICH_GPU_SUPPORT_CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA of MPICH"""


def reports_cuda_support(mpi: Any) -> bool | None:
    """Return whether the MPI library reports support for GPU memory; None: the library has no such query.

    The query of Open MPI and MVAPICH differs from MPICH's.
    """
    library, answer = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        return not library.MPIX_GPU_query_support(_MPICH_GPU_SUPPORT_CUDA, ctypes.byref(answer)) and bool(answer.value)
    return None


def verify_device_messages(comm: Any, array: Any) -> bool:
    """Return whether a message from this rank to itself, between the two halves of a device array, arrives.

    Parameters
    ----------
    array : device array (2 n,)
    """
    half = len(array) // 2
    array[:half], array[half:] = 1, 0
    array.get()  # wait for both assignments
    try:
        comm.Sendrecv(array[:half], comm.Get_rank(), 0, array[half:], comm.Get_rank(), 0)
    except Exception:  # raised by mpi4py, also for errors of the MPI library
        return False
    return bool(np.all(array.get() == 1))
