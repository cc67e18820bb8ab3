#!/usr/bin/env bash
# Trains on N ranks of this machine under torchrun (N = 2 unless given); everything else goes to 'fedmpi train'.
#
#   bash launch/torchrun.sh 4 --algorithm fedavg --data glyphs --out runs/a
#   bash launch/torchrun.sh --help          this text;  fedmpi train --help  has the arguments
#
# For several machines use torchrun itself: torchrun --nnodes=2 --rdzv-endpoint=HOST:PORT ... -m fedmpi train ...
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
[[ -x $python ]] || python=python3

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # torchrun warns when it has to choose; fedmpi sets its own threads
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$ranks" -m fedmpi train "$@"
