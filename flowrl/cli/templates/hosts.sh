#!/bin/bash
# Starts a Ray cluster on the machines below and runs flowrl on it. Start it on the first of them:
#     bash FILE                     a new run
#     bash FILE --resume RUN        go on with a run
# This file and the folder of the run are at the same paths on every machine, and ssh asks for no
# password. Machines: @{machines}
@{begin}

# On every machine but the first, over ssh: standard input has the token, and ends with the script.
if [ "${1-}" = --join ]; then
    head -n 1 > "$token"
    address=$2
    ray start --address="$address" --disable-usage-stats --block < /dev/null &
    started+=($!)
    cat > /dev/null
    exit
fi

[ $# -gt 0 ] || set -- @{words}
python -c 'import secrets; print(secrets.token_hex(32))' > "$token"
ip=$(hostname -I | awk '{ print $1 }')  # another one where machines talk over another network
address=$ip:@{port}
ray start --head --node-ip-address="$ip" --port=@{port} --include-dashboard=false \
    --disable-usage-stats --block &
started+=($!)
for host in @{others}; do
    ssh -o BatchMode=yes -- "$host" "bash $script --join $address" \
        < <(exec tail --pid=$$ -n +1 -f -- "$token") &
    started+=($!)
done
num_nodes=@{num_nodes}
@{run}
