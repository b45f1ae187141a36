#!/bin/bash
# Starts a Ray cluster on the machines below and runs flowrl on it. Start it on the first of them:
#     bash FILE                     a new run
#     bash FILE --resume RUN        go on with a run
# This file and the folder of the run are at the same paths on every machine, and ssh asks for no
# password. Machines: first me@second 10.0.0.3
set -euo pipefail
umask 077
export PATH='/opt/flow rl/bin':"$PATH"
script=$(printf %q "$(realpath -- "$0")")
cd -- '/data/o'"'"'brien & co'

token=$(mktemp -p /tmp .flowrl-token-XXXXXX)
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

# On every machine but the first, over ssh: standard input has the token, and ends with the script.
if [ "${1-}" = --join ]; then
    head -n 1 > "$token"
    address=$2
    ray start --address="$address" --disable-usage-stats --block < /dev/null &
    started+=($!)
    cat > /dev/null
    exit
fi

[ $# -gt 0 ] || set -- 'my configs/a$b.yaml' 'name=it'"'"'s `new`' executor=ray
python -c 'import secrets; print(secrets.token_hex(32))' > "$token"
ip=$(hostname -I | awk '{ print $1 }')  # another one where machines talk over another network
address=$ip:6379
ray start --head --node-ip-address="$ip" --port=6379 --include-dashboard=false \
    --disable-usage-stats --block &
started+=($!)
for host in me@second 10.0.0.3; do
    ssh -o BatchMode=yes -- "$host" "bash $script --join $address" \
        < <(exec tail --pid=$$ -n +1 -f -- "$token") &
    started+=($!)
done
num_nodes=3
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
