"""Start and supervision of MPI jobs: mpirun, its monitoring, and its cleanup.

Modules that `neondist run -n 4` uses, in order:

ranks: source of a command's ranks: an MPI job, mpirun, threads of this process, or this process alone.
launch: mpirun with the same command on every rank. mpirun: its executable and options. pinning: CPU affinity of ranks.
supervision: forwards signals to mpirun, returns its exit code. mpirun_notices: removes mpirun's messages from output.
monitor: heartbeats and exit codes of ranks. parent_watch: ends processes with their parent.
cleanup: removes Open MPI's files after a job. report: prints an error on one rank only.

Jobs on several machines or with restarts: placement, members, generations, restarts, snapshots.
Jobs with servers: workers, worker_processes, service_process, job_nodes, remote, scaling, slots, fork_server.
Processes of `neondist doctor`, in which MPI or an import may crash or hang: mpi_probe, import_probe.

`arguments` is a command parsed by `neondist.cli.arguments`: an argparse.Namespace that also has the command's words.
"""
