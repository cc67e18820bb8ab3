#!/usr/bin/env bash
# Submits a run to Slurm: 'fedmpi submit' with the Python of this checkout. Returns when the job is queued.
#
#   bash launch/submit.sh --nodes 2 --ranks_per_node 4 --time 60 -- train --algorithm fedyogi --out runs/a
#   bash launch/submit.sh --help
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# > 0)) || set -- --help
exec "$python" -m fedmpi submit "$@"
