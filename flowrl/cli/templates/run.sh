python -m flowrl.cli.launch "$address" "$num_nodes"  # waits until all nodes have joined
export RAY_ADDRESS="$address"
flowrl run "$@@" &
run=$!
trap 'kill -TERM "$run"' INT TERM HUP  # ends it with a checkpoint
status=0
wait "$run" || status=$?
while kill -0 "$run" 2> /dev/null; do
    status=0
    wait "$run" || status=$?
done
exit "$status"
