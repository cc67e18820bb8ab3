#!/usr/bin/env bash
# Trains on N ranks of this machine that talk through torch.distributed (N = 2 unless given): 'fedmpi train --ranks N'
# with the Python of this checkout. Everything else goes to 'fedmpi train'.
#
#   bash launch/torchrun.sh 4 --algorithm fedavg --data glyphs --out runs/a
#   bash launch/torchrun.sh 4 --max-restarts 0 --algorithm fedavg ...
#   bash launch/torchrun.sh --help          this text;  fedmpi train --help  has the arguments
#
# When a rank dies, all are restarted from the newest checkpoint, at most --max-restarts times (3 unless given). Ctrl-C,
# SIGTERM and SIGUSR2 stop the run in good order. Ends with the code of the ranks: 0 done, 2 the caller's mistake, 75
# stopped in good order (the same command resumes), anything else a fault. For several machines: slurm/.
# torchrun itself is not used: on a shared machine its rendezvous lets every user run code in the run's name.
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_arguments "$@"
launched=(--ranks "$ranks" --max_restarts "$restarts")
((ranks > 1)) || launched=()  # one rank is the command itself
exec "$python" -m fedmpi train "${launched[@]}" "${rest[@]}"
