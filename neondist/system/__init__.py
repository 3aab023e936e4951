"""Process and machine: memory, threads, signals, heartbeats, the MPI job."""
