#!/usr/bin/env bash
# Trains on N ranks of this machine with torch.distributed (default: 2): 'fedmpi train --ranks N' with the Python of
# this checkout. All other arguments are passed to 'fedmpi train'.
#
#   bash launch/torchrun.sh 4 --algorithm fedavg --data glyphs --out runs/a
#   bash launch/torchrun.sh 4 --max-restarts 0 --algorithm fedavg ...
#   bash launch/torchrun.sh auto ...        a rank for each GPU
#   bash launch/torchrun.sh --help          this text; 'fedmpi train --help' lists the arguments
#
# When a rank dies, all are restarted from the newest checkpoint, at most --max-restarts times (default: 3). Ctrl-C,
# SIGTERM and SIGUSR2 stop the run in good order. The exit code is that of the ranks: 0 finished, 2 user error, 75
# stopped in good order (the same command resumes), anything else a failure. For several machines: slurm/.
# torchrun itself is not used: on a shared machine its rendezvous lets every user run code in the run's name.
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_arguments "$@"
launched=(--ranks "$ranks" --max_restarts "$restarts")
[[ $ranks != 1 ]] || launched=()  # one rank is the command itself
exec "$python" -m fedmpi train "${launched[@]}" "${rest[@]}"
