"""Probe of MPI in a separate process: prints the library, or the error, as a line of JSON."""

import json

from ..comm import cuda, shared_memory

if __name__ == "__main__":
    try:
        with shared_memory.mpi_start_folder():
            from mpi4py import MPI
        shared_memory.unlink_segments(MPI)
        library = MPI.Get_library_version().splitlines()[0].split(", package")[0].strip(" ,\x00")
        print(json.dumps({"library": library, "is_cuda_aware": cuda.reports_cuda_support(MPI)}))
    except Exception as error:
        print(json.dumps({"error": str(error).splitlines()[0]}))
