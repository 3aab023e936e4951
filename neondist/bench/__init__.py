"""Benchmarks of training steps and halo exchanges.

step: steps per second, a table of the layers, memory, limits, and the same network in PyTorch. suite, module_step:
several networks or PyTorch modules. halo: exchanges compared with raw MPI. scaling: the step on increasing rank counts.
schemes: accuracy, bytes and time of border schemes. seams: their errors by distance to the seam. model: predictions.
Unlike the library, benchmarks use (sleeping) barriers.
"""
