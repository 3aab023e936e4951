"""Tests that run on ranks of torch.distributed, started by test_under_torchrun.py."""

import os

collect_ignore_glob = [] if {"TORCHELASTIC_RUN_ID", "NEONDIST_MPI_TEST"} <= os.environ.keys() else ["test_*.py"]
