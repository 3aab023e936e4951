"""Benchmarks of training steps and halo exchanges.

step: steps per second, a table of the layers, memory, limits, and the same network in PyTorch. halo: exchanges
compared with raw MPI. scaling: the step on increasing rank counts. schemes: accuracy, bytes and time of border schemes.
seams: errors of border schemes by distance to the seam. Unlike the library, benchmarks use (sleeping) barriers.
"""
