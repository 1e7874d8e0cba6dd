#!/bin/bash
# Processes that Open MPI's mpirun starts: cluster.Attach and comm.Init read its variables, and do
# not use MPI. HOSTS is a list with the number of processes of each host; the first has rank 0.
#
#   HOSTS=node1:8,node2:8 CHORUS_SECRET_FILE=~/.chorus-secret openmpi.sh ./train --steps 1000
#
# With MPICH and Intel MPI, set the two variables by -genv instead of -x.
set -euo pipefail
first=${HOSTS%%[:,]*}
exec mpirun --host "$HOSTS" -x CHORUS_SECRET_FILE -x CHORUS_SEEDS="${CHORUS_SEEDS:-$first:29477}" "$@"
