"""Who watches a pass (`neondist.observer`): each is told what begins and ends, and is shown arrays.

clock: the time of each layer's parts. trace: all ranks on one time line. ledger: messages and sums. nonfinite: where
a number first was not finite. whereabouts: what a rank is doing, in words, for the watchdog.
"""
