#!/usr/bin/env bash
# Trains on N ranks under MPI (N = 2 unless given); everything else goes to 'fedmpi train --comm mpi'.
#
#   bash launch/mpirun.sh 4 --algorithm fedavg --data glyphs --out runs/a
#   bash launch/mpirun.sh --help          this text;  fedmpi train --help  has the arguments
#
# Takes mpiexec from .venv where there is one, else from PATH: it has to belong to the MPI library that mpi4py loads.
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi

ranks=2
if [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    ranks=$1
    shift
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
mpiexec=$root/.venv/bin/mpiexec
[[ -x $python ]] || python=python3
[[ -x $mpiexec ]] || mpiexec=mpiexec

# '-m mpi4py' aborts the whole job when one rank fails; without it the others would wait for ever.
exec "$mpiexec" -n "$ranks" "$python" -m mpi4py -m fedmpi train --comm mpi "$@"
