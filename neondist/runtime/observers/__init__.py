"""Observers of a pass (`neondist.observer`), which receive the start and end of each event, and arrays.

clock: time of each layer by kind of work. trace: timeline of all ranks. ledger: messages and reductions. nonfinite:
origin of the first non-finite value. current_activity: description of a rank's current activity, for the watchdog.
"""
