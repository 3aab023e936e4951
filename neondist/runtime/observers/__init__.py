"""Observers of a pass (`neondist.observer`), which are notified of the start and end of events, and of arrays.

clock: time of each layer by kind of work. trace: timeline of all ranks. ledger: messages and reductions. nonfinite:
origin of the first non-finite value. current_activity: description of a rank's current activity, for the watchdog.
"""
