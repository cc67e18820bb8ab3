#!/usr/bin/env bash
# Trains on N ranks under MPI (default: 2). All other arguments are passed to 'fedmpi train --comm mpi'.
#
#   bash launch/mpirun.sh 4 --algorithm fedavg --data glyphs --out runs/a
#   bash launch/mpirun.sh 4 --max-restarts 0 --algorithm fedavg ...
#   bash launch/mpirun.sh auto ...        a rank for each GPU
#   bash launch/mpirun.sh --help          this text; 'fedmpi train --help' lists the arguments
#
# When a rank dies, MPI ends the others; all are restarted from the newest checkpoint, at most --max-restarts times
# (default: 3). Ctrl-C, SIGTERM and SIGUSR2 stop the run in good order. The exit code is that of the ranks: 0 finished,
# 2 user error, 75 stopped in good order (the same command resumes), anything else a failure.
# mpiexec is taken from .venv if it is there, else from PATH: it must belong to the MPI library that mpi4py loads.
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_arguments "$@"
if [[ $ranks == auto ]]; then
    ranks=$("$python" -c 'from fedmpi.device import count; print(count())')
    ((ranks > 0)) || fail "the number of ranks is auto, which is a rank for each GPU, but none is visible"
fi
mpiexec=$root/.venv/bin/mpiexec
[[ -x $mpiexec ]] || mpiexec=mpiexec

# On one machine the loopback interface is enough (for UCX and libfabric, which MPICH uses).
if [[ -z ${SLURM_JOB_ID-}${PBS_JOBID-}${LSB_JOBID-}${JOB_ID-}${HYDRA_HOST_FILE-} ]]; then
    export UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo} FI_TCP_IFACE=${FI_TCP_IFACE:-lo}
fi

signalled=0
export FEDMPI_LAUNCH=$HOSTNAME-$$
for ((attempt = 0; ; attempt++)); do
    export FEDMPI_RESTART_COUNT=$attempt
    # '-m mpi4py' aborts the whole job when one rank fails; without it the others would wait forever.
    watch "$mpiexec" -n "$ranks" "$python" -m mpi4py -m fedmpi train --comm mpi "${rest[@]}"
    case $code in
        0 | 2 | 75 | 130) break ;;
    esac
    ((signalled == 0 && attempt < restarts)) || break
    printf '%s: mpiexec ended with exit code %d; restart %d of %d\n' "$0" "$code" $((attempt + 1)) "$restarts" >&2
done
exit "$code"
