"""Hooks of a training run (`hook`) that write, display or stop it.

progress, metrics_log, ledger_log, curves, tiles_picture, stage_pictures: output for users. checkpoint: state to resume
from. stopping, watchdog, io_counts: early stops and hangs. debug_halo: checked execution.
"""
