#!/usr/bin/env bash
# Trains on N ranks of this machine under torchrun (N = 2 unless given); everything else goes to 'fedmpi train'.
#
#   bash launch/torchrun.sh 4 --algorithm fedavg --data glyphs --out runs/a
#   bash launch/torchrun.sh 4 --max-restarts 0 --algorithm fedavg ...
#   bash launch/torchrun.sh --help          this text;  fedmpi train --help  has the arguments
#
# When a rank dies, all are started again and go on from the newest checkpoint, at most --max-restarts times (3 unless
# given). Ctrl-C and SIGTERM stop the run in good order, and so does SIGUSR2. Ends with the code of the ranks: 0 done,
# 2 the caller's mistake, 75 stopped in good order (the same command goes on), anything else a fault.
# For several machines: slurm/torchrun.sbatch, or torchrun itself with --nnodes and --rdzv-endpoint.
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_arguments "$@"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # torchrun warns when it has to choose; fedmpi sets its own threads
FEDMPI_CODES=$(mktemp -d)  # torchrun ends with 1 whatever its ranks end with, so they leave their codes here
export FEDMPI_CODES
trap 'rm -rf "$FEDMPI_CODES"' EXIT

# Ranks stop at the end of a round; torchrun kills those that have not left after the shutdown timeout.
asked=0
watch "$python" "$root/launch/ranks.py" "$ranks" "$restarts" "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}" "${rest[@]}"
for known in 130 75 2; do
    if ((code)) && grep -qsx "$known" "$FEDMPI_CODES"/*; then
        code=$known
    fi
done
exit "$code"
