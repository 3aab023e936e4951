"""Measurements: what a training step costs, and what a halo exchange costs.

step: steps per second, a table of the layers, memory, limits, and the same network in PyTorch. halo: exchanges
against raw MPI. scaling: the step on more and more ranks. schemes: accuracy, bytes and time of border schemes. seams:
their errors by the distance to the seam. Unlike the library, measurements may wait for all ranks (`rest`).
"""
