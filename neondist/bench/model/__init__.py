"""A model that predicts a step on machines and rank counts that are not at hand.

machine: latency, bandwidth and cores, read from and written to YAML. solo: one rank of many, alone, which notes what it
would send. predict: seconds, bytes and memory of a step for a rank count and a grid. calibrate: measures this machine.
"""
