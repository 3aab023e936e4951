#!/bin/bash
# Start a one-node Slurm cluster on this machine for trying out jobs (as root; Debian: install slurm-wlm and munge):
#   tools/slurm_node.sh FOLDER        starts Slurm; then export SLURM_CONF=FOLDER/slurm.conf
#   tools/slurm_node.sh FOLDER stop   stops Slurm
set -eu
folder=$(realpath "$1") host=$(hostname -s)

if [ "${2:-}" = stop ]; then
    for name in slurmd slurmctld munged; do kill "$(cat "$folder/$name.pid")" || true; done
    exit
fi
mkdir -p "$folder/state" "$folder/spool"
chmod 755 "$folder"
(umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
# cred_expire: seconds that a requeued job waits (default: two minutes)
cat > "$folder/slurm.conf" << END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
SelectType=select/cons_tres
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc)
PartitionName=main Nodes=$host Default=YES State=UP
END
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
export SLURM_CONF=$folder/slurm.conf
slurmctld
slurmd
sinfo
