"""Tests that run inside ranks of torch.distributed; test_under_torchrun.py starts them."""

import os

collect_ignore_glob = [] if {"TORCHELASTIC_RUN_ID", "NEONDIST_MPI_TEST"} <= os.environ.keys() else ["test_*.py"]
