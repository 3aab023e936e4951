"""Detection of the MPI job from the environment."""

import pytest

from neondist.system.job import Job, count_torchrun_ranks, detect_job

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_SIZE": "6", "PMI_RANK": "0", "MPI_LOCALNRANKS": "3"}
SLURM_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({}, None),
        ({"PATH": "/bin"}, None),
        (OPEN_MPI, Job(4, 3, 2)),
        (HYDRA, Job(6, 0, 3)),
        (SLURM_STEP, Job(8, 5, 4)),
        ({**SLURM_STEP, "PMIX_RANK": "5"}, Job(8, 5, 4)),
        ({**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, None),  # srun --pty bash
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, None),  # the batch script itself
        ({"PMIX_RANK": "2"}, Job(None, 2, None)),
        ({"NEONDIST_LAUNCHED": "4"}, Job(4, None, 4)),  # an mpirun without variables of its own
        ({**HYDRA, "PMI_SIZE": "1", "NEONDIST_LAUNCHED": "4"}, Job(4, 0, 3)),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, Job(1, 0, None)),
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_detect(env, job):
    assert detect_job(env) == job


def test_first_rank():
    assert [Job(4, rank, 4).is_first_rank for rank in range(3)] == [True, False, False]
    assert Job(None, None, None).is_first_rank


def test_torchrun_is_not_an_mpi_job():
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert count_torchrun_ranks(env) == 0  # users may set these, too
    assert count_torchrun_ranks({**env, "TORCHELASTIC_RUN_ID": "none"}) == 4
    assert detect_job({**env, "TORCHELASTIC_RUN_ID": "none"}) is None
