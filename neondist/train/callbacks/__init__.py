"""Hooks of a training run (`hook`) that write, display or stop it.

progress, metrics_log, ledger_log, curves, tiles_picture, stage_pictures: what people look at. checkpoint: what a run
goes on from. stopping, watchdog, io_counts: when it ends, or hangs. debug_halo: a slow run that finds mistakes.
"""
