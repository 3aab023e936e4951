"""The process and its machine: memory, threads, signals, heartbeats, the job that it is part of; no arrays."""
