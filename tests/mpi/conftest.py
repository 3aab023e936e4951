"""Tests that run inside mpirun, started by test_under_mpirun.py."""

import os

collect_ignore_glob = [] if "NEONDIST_MPI_TEST" in os.environ else ["test_*.py"]
