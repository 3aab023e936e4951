"""Performance model that predicts a step on other machines and rank counts.

rank_profile: measurement of one of many ranks, run alone in this process. dry_run: the transport of that rank, which
records messages instead of sending them. predict: seconds, bytes, memory, grid and schemes of a step for a rank count.
table: reports. calibrate: measurements of this machine.
"""
