"""Observers of a pass (`neondist.observer`), which receive the start and end of events, and arrays.

clock: the time of each layer's parts. trace: all ranks on one time line. ledger: messages and sums. nonfinite: where
a number first was not finite. whereabouts: what a rank is doing, in words, for the watchdog.
"""
