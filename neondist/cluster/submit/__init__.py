"""Jobs for the schedulers of clusters.

`submission`: an experiment, its files and its numbers of nodes and ranks. `slurm`: a batch script. `manifests`: objects
of Kubeflow's MPI operator and Trainer. `kubernetes`: creates and deletes them, and follows the job.
"""

from .submission import Submission, job_name

__all__ = ["Submission", "job_name"]
