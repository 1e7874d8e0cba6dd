#!/bin/bash
# Processes that Open MPI's mpirun starts: cluster.Attach and comm.Init read its variables, and do
# not use MPI. HOSTS is a list with the number of processes of each host; the first has rank 0.
#
#   HOSTS=node1:8,node2:8 CHORUS_SECRET_FILE=~/.chorus-secret openmpi.sh ./train --steps 1000
#
# The port is a random one, so that two jobs can share a host. With MPICH and Intel MPI, set the two
# variables by -genv instead of -x; on a single host they need neither.
set -euo pipefail
first=${HOSTS%%[:,]*}
exec mpirun --host "$HOSTS" -x CHORUS_SECRET_FILE -x CHORUS_SEEDS="${CHORUS_SEEDS:-$first:$((61440 + RANDOM % 4096))}" "$@"
