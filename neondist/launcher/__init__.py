"""Jobs of ranks: starting mpirun, watching it, and ending it without a trace.

`neondist run -n 4` goes through it in this order:

ranks: where a command's ranks come from: an MPI job, mpirun, threads of this process, or this process alone.
launch: mpirun with the same command; what its ranks are told. mpirun: which one, and its options. pinning: their cores.
supervise: signals go to mpirun, its exit code comes back. filter_mpirun: its output, less its own messages.
parent_watch: no process outlives its parent. cleanup: nor do files; `comm.segments`: in the ranks.
members: the hosts of a job, and how many ranks. generations: after a loss, or a change of hosts, the job goes on.
restarts: from which checkpoint. snapshots: until when nodes keep theirs.
fork_server: processes of a job with servers that have no imports left to do.
report: an error is printed once, and ends all ranks.
tell_mpi: a process of `neondist doctor`, which MPI may end or hang.

`arguments` is a command as `neondist.cli.arguments` parses it: its words, what they mean, and what its parser sets.
"""
