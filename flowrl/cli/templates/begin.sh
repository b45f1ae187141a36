set -euo pipefail
umask 077
export PATH=@{bin}:"$PATH"
script=$(printf %q "$(realpath -- "$0")")
cd -- @{folder}

token=$(mktemp -p @{token_folder} .flowrl-token-XXXXXX)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # at the end nothing is left to wait for
started=()
end() {
    kill "${started[@@]}" 2> /dev/null || true
    wait
    rm -f -- "$token"
    # Ray notes here which cluster later programs join, and leaves the note.
    if grep -qsx "${address-}" /tmp/ray/ray_current_cluster; then
        rm -f /tmp/ray/ray_current_cluster
    fi
}
trap end EXIT
