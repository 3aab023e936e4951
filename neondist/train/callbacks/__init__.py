"""Hooks of a training run, with the base class in `hook`.

progress_bar, metrics_log, ledger_log, curves_picture, tiles_picture, stage_pictures: output for users. checkpoint:
state to resume from. stopping: graceful stops. watchdog, disk_activity: detection of hangs. debug_halo: checked runs.
"""
