"""Start and supervision of MPI jobs: mpirun, its monitoring, and its cleanup.

Modules that `neondist run -n 4` uses, in order, and some others:

ranks: source of a command's ranks: an MPI job, mpirun, threads of this process, or this process alone.
launch: mpirun with the same command on every rank. mpirun: its executable and options. pinning: CPU affinity of ranks.
supervision: forwards signals to mpirun, returns its exit code. mpirun_notices: removes mpirun's messages from output.
parent_watch: ends processes with their parent. cleanup: removes Open MPI's files; in ranks, `comm.shared_memory` does.
members: hosts and number of ranks. generations: continue a job after a failure or a change of hosts.
restarts: checkpoint to resume from. snapshots: lifetime of snapshots on nodes.
fork_server: forks processes of jobs with servers from one that has imported their modules.
report: prints an error once, and ends all ranks.
mpi_probe, import_probe: processes of `neondist doctor`, in which MPI or an import may crash or hang.

`arguments` is a command parsed by `neondist.cli.arguments`: an argparse.Namespace that also has the command's words.
"""
