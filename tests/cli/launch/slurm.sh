#!/bin/bash
#SBATCH --job-name=9-My-run-s-name
#SBATCH --output=%x-%j.out
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-node=8
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@300
# Starts a Ray cluster on the nodes of the job and runs flowrl on it. Options of sbatch go before
# the file, and may change the lines above:
#     sbatch --partition=NAME --time=HH:MM:SS FILE                  a new run
#     sbatch --partition=NAME --time=HH:MM:SS FILE --resume RUN     go on with a run
# The folder of the run is at the same path on every node. Five minutes before the time is over, the
# run writes a checkpoint and ends.
set -euo pipefail
umask 077
export PATH='/opt/flow rl/bin':"$PATH"
script=$(printf %q "$(realpath -- "$0")")
cd -- '/data/o'"'"'brien & co'

token=$(mktemp -p "$PWD" .flowrl-token-XXXXXX)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # at the end nothing is left to wait for
started=()
end() {
    kill "${started[@]}" 2> /dev/null || true
    wait
    rm -f -- "$token"
    # Ray notes here which cluster later programs join, and leaves the note.
    if grep -qsx "${address-}" /tmp/ray/ray_current_cluster; then
        rm -f /tmp/ray/ray_current_cluster
    fi
}
trap end EXIT

[ $# -gt 0 ] || set -- 'my configs/a$b.yaml' 'name=it'"'"'s `new`' executor=ray
python -c 'import secrets; print(secrets.token_hex(32))' > "$token"
ip=$(hostname -I | awk '{ print $1 }')  # another one where nodes talk over another network
port=$((20000 + SLURM_JOB_ID % 20000))  # several jobs may share a node
address=$ip:$port
ray start --head --node-ip-address="$ip" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" \
    --include-dashboard=false --disable-usage-stats --block &
started+=($!)
num_nodes=$SLURM_JOB_NUM_NODES
if [ "$num_nodes" -gt 1 ]; then
    srun --nodes=$((num_nodes - 1)) --ntasks=$((num_nodes - 1)) --exclude="$SLURMD_NODENAME" \
        --cpus-per-task="$SLURM_CPUS_PER_TASK" --no-kill --kill-on-bad-exit=0 \
        ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" \
        --disable-usage-stats --block &
    started+=($!)
fi
python -m flowrl.cli.launch "$address" "$num_nodes"  # waits until all nodes have joined
export RAY_ADDRESS="$address"
flowrl run "$@" &
run=$!
trap 'kill -TERM "$run"' INT TERM HUP  # ends it with a checkpoint
status=0
wait "$run" || status=$?
while kill -0 "$run" 2> /dev/null; do
    status=0
    wait "$run" || status=$?
done
exit "$status"
