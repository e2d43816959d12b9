#!/usr/bin/env bash
# Brings a Ray cluster up on the machines of a Slurm allocation, runs a profile on it, and ends with the run:
#   sbatch --nodes=8 --gpus-per-node=8 scripts/slurm_cluster.sh --profile P [--set …]
# Needs the same folder, user and Python environment on all machines. Slurm ends what is left with the job.
set -euo pipefail
: "${SLURM_JOB_ID:?run this in a Slurm allocation}"
port=${RAY_PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
addresses=$(srun --nodes=1 --ntasks=1 -w "$head" hostname -I)
address=${addresses%% *}
addresses+=" $(srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 hostname -I | xargs)"

umask 077
# Other users can guess the number of a job: by names without chance they could make file and folder first.
name=$SLURM_JOB_ID-$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' \n')
secrets=$PWD/.ray-$name
mkdir "$secrets"
trap 'rm -rf "$secrets"' EXIT
head -c 32 /dev/urandom | base64 > "$secrets/token"
# Ray sends the token to whoever listens at the port of the head: by the certificate only to who has its key.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=$name" \
  -addext "subjectAltName=IP:127.0.0.1$(printf ',IP:%s' $addresses)" \
  -keyout "$secrets/key" -out "$secrets/crt" 2> /dev/null
export RAY_USE_TLS=1 RAY_TLS_SERVER_KEY=$secrets/key RAY_TLS_SERVER_CERT=$secrets/crt RAY_TLS_CA_CERT=$secrets/crt
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$secrets/token RAY_USAGE_STATS_ENABLED=0
export RAY_memory_monitor_refresh_ms=0 RAY_kill_child_processes_on_worker_exit=0

# Made before Ray starts, which would use one of another user, and write its logs through links in it.
folder=/tmp/ray-$name
srun --overlap --nodes="$SLURM_NNODES" --ntasks-per-node=1 mkdir -m 700 "$folder"
srun --overlap --nodes=1 --ntasks=1 -w "$head" ray start --block --head --node-ip-address="$address" --port="$port" \
  --include-dashboard=false --temp-dir="$folder" &
started=$!
lives() {
  kill -0 "$started" 2>/dev/null || { echo "Ray ended on $head; if port $port is taken, RAY_PORT=N is another" >&2; exit 1; }
}
if [ "$SLURM_NNODES" -gt 1 ]; then
  until timeout 2 bash -c "</dev/tcp/$address/$port" 2>/dev/null; do lives; sleep 1; done
  srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --exclude="$head" \
    ray start --block --address="$address:$port" --temp-dir="$folder" &
fi
# `ray list nodes` asks a dashboard, which answers without TLS on a port of its own.
until timeout 30 python -P -c 'import sys, ray
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))' "$address:$port" "$SLURM_NNODES" 2>/dev/null; do
  lives
  sleep 1
done
srun --overlap --nodes=1 --ntasks=1 -w "$head" grpo-tui up --wait finished \
  --set cluster.kind=ray --set cluster.address="$address:$port" "$@"
