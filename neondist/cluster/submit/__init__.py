"""Jobs for the schedulers of clusters.

`submission`: an experiment, its files and its numbers of nodes and ranks. `slurm`: a batch script. `manifests`: the
objects of Kubeflow's MPI operator and Trainer. `kubernetes`: creates them, follows the job, deletes them.
"""

from .submission import Submission, job_name

__all__ = ["Submission", "job_name"]
