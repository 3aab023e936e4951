"""A model that predicts a step on machines and rank counts that are not at hand.

rank_profile: one rank of many computes a step in this process. dry_run: its transport, which notes what it would
send. predict: seconds, bytes, memory, grid and schemes of a step for a rank count. table, drawing: the same to
read. calibrate, workload: measure this machine.
"""
