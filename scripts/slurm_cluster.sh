#!/usr/bin/env bash
# Brings a Ray cluster up on the machines of a Slurm allocation, runs a profile on it, and ends with the run:
#   sbatch --nodes=8 --gpus-per-node=8 scripts/slurm_cluster.sh --profile P [--set …]
# Needs the same folder, user and Python environment on all machines. Slurm ends what is left with the job.
set -euo pipefail
: "${SLURM_JOB_ID:?run this in a Slurm allocation}"
port=${RAY_PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname -I | awk '{print $1}')

umask 077
# Other users can guess the number of a job: by names without chance they could make file and folder first.
name=$SLURM_JOB_ID-$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' \n')
token=$PWD/.ray-token-$name
trap 'rm -f "$token"' EXIT
head -c 32 /dev/urandom | base64 > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_USAGE_STATS_ENABLED=0
export RAY_memory_monitor_refresh_ms=0 RAY_kill_child_processes_on_worker_exit=0

# Made before Ray starts, which would use one of another user, and write its logs through links in it.
folder=/tmp/ray-$name
srun --overlap --nodes="$SLURM_NNODES" --ntasks-per-node=1 mkdir -m 700 "$folder"
srun --overlap --nodes=1 --ntasks=1 -w "$head" ray start --block --head --node-ip-address="$address" --port="$port" \
  --include-dashboard=false --temp-dir="$folder" &
if [ "$SLURM_NNODES" -gt 1 ]; then
  until timeout 2 bash -c "</dev/tcp/$address/$port" 2>/dev/null; do sleep 1; done
  srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --exclude="$head" \
    ray start --block --address="$address:$port" --temp-dir="$folder" &
fi
until [ "$(ray list nodes --address "$address:$port" --format json 2>/dev/null | grep -c '"ALIVE"')" -ge "$SLURM_NNODES" ]; do
  sleep 1
done
srun --overlap --nodes=1 --ntasks=1 -w "$head" grpo-tui up --wait finished \
  --set cluster.kind=ray --set cluster.address="$address:$port" "$@"
