#!/bin/bash
# Processes that torchrun starts. Run it on each host, with the same address of the first one.
#
#   torchrun.sh 2 node1 ./train --steps 1000
set -euo pipefail
nodes=$1 head=$2
shift 2
exec torchrun --no-python --nnodes "$nodes" --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint "$head:29400" "$@"
