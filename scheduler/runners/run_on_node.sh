#!/bin/sh
# Slurm or Ray runs this on a node: run_on_node.sh PYTHON FOLDER LAUNCH
for python in "$1" python3; do
    if command -v "$python" >/dev/null 2>&1; then
        exec "$python" -I -S -B "$2/node_shim.py" "$3"
    fi
done
echo "gpujob: node $(hostname) has no Python: neither $1 nor python3 in PATH" >&2
exit 127
