#!/usr/bin/env bash
# Trains on N ranks under MPI (N = 2 unless given); everything else goes to 'fedmpi train --comm mpi'.
#
#   bash launch/mpirun.sh 4 --algorithm fedavg --data glyphs --out runs/a
#   bash launch/mpirun.sh 4 --max-restarts 0 --algorithm fedavg ...
#   bash launch/mpirun.sh --help          this text;  fedmpi train --help  has the arguments
#
# When a rank dies, MPI ends the others; all are started again and go on from the newest checkpoint, at most
# --max-restarts times (3 unless given). Ctrl-C, SIGTERM and SIGUSR2 stop the run in good order. Ends with the code of
# the ranks: 0 done, 2 the caller's mistake, 75 stopped in good order (the same command goes on), else a fault.
# Takes mpiexec from .venv where there is one, else from PATH: it has to belong to the MPI library that mpi4py loads.
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_arguments "$@"
mpiexec=$root/.venv/bin/mpiexec
[[ -x $mpiexec ]] || mpiexec=mpiexec

# On this machine alone the ranks have no use for another network interface (UCX and libfabric, which MPICH talks through).
if [[ -z ${SLURM_JOB_ID-}${PBS_JOBID-}${LSB_JOBID-}${JOB_ID-}${HYDRA_HOST_FILE-} ]]; then
    export UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo} FI_TCP_IFACE=${FI_TCP_IFACE:-lo}
fi

asked=0
export FEDMPI_LAUNCH=$HOSTNAME-$$
for ((life = 0; ; life++)); do
    export FEDMPI_RESTART_COUNT=$life
    # '-m mpi4py' aborts the whole job when one rank fails; without it the others would wait for ever.
    watch "$mpiexec" -n "$ranks" "$python" -m mpi4py -m fedmpi train --comm mpi "${rest[@]}"
    case $code in
        0 | 2 | 75 | 130) break ;;
    esac
    ((asked == 0 && life < restarts)) || break
    printf '%s: mpiexec ended with code %d; starting again (%d of %d)\n' "$0" "$code" $((life + 1)) "$restarts" >&2
done
exit "$code"
