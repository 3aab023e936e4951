"""Tests that run inside mpirun; test_under_mpirun.py starts them."""

import os

collect_ignore_glob = [] if "NEONDIST_MPI_TEST" in os.environ else ["test_*.py"]
