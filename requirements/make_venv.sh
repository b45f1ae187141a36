#!/bin/sh
# make_venv.sh FOLDER: an empty virtual environment of the first suitable Python found.
# PYTHON=/path/to/python chooses another than the first.
set -eu

suitable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

for python in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
    if ! suitable "$python"; then
        continue
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$python cannot make virtual environments: its venv module is missing." >&2
        echo "On Debian and Ubuntu: apt install python3-venv" >&2
        exit 2
    fi
    exec "$python" -m venv "$1"
done

echo "flowrl needs Python 3.11 or newer, and found none (looked for ${PYTHON:-python3.11, python3})." >&2
echo "On Debian 12: apt install python3 python3-venv; or set PYTHON=/path/to/python3.11" >&2
exit 2
