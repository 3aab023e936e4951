"""Hooks of a training run (`hook`) that write, display or stop it.

progress_bar, metrics_log, ledger_log, curves_picture, tiles_picture, stage_pictures: output for users. checkpoint:
state to resume from. stopping, watchdog, disk_activity: early stops and hangs. debug_halo: checked execution.
"""
