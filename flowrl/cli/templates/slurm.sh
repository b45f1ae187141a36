#!/bin/bash
#SBATCH --job-name=@{name}
#SBATCH --output=%x-%j.out
#SBATCH --nodes=@{num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@{num_cpus}
@{accelerators}#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@@300
# Starts a Ray cluster on the nodes of the job and runs flowrl on it. Options of sbatch go before
# the file, and may change the lines above:
#     sbatch --partition=NAME --time=HH:MM:SS FILE                  a new run
#     sbatch --partition=NAME --time=HH:MM:SS FILE --resume RUN     go on with a run
# The folder of the run is at the same path on every node. Five minutes before the time is over, the
# run writes a checkpoint and ends.
@{begin}

[ $# -gt 0 ] || set -- @{words}
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
@{run}
