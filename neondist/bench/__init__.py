"""Measurements: what a training step costs, and what a halo exchange costs.

step: steps per second, a table of the layers, memory, and the same network in PyTorch. halo: exchanges against raw MPI.
Unlike the library, measurements may wait for all ranks (`rest`).
"""
