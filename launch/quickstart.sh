#!/usr/bin/env bash
# From a fresh checkout to two trained models: FedYogi on generated digits, 100 clients with two classes each, on two
# ranks; once with the plain mean and once with gradient masked averaging. Ends with a table of both.
#
#   bash launch/quickstart.sh
set -euo pipefail

if (($# > 0)); then
    sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [[ $1 == -h || $1 == --help ]] && exit 0 || exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
trap 'exit 130' INT
bash launch/setup.sh test

# A run folder is never overwritten, so each quickstart gets the next free number.
mkdir -p runs/quickstart
number=1
while [[ -e runs/quickstart/$number ]]; do
    number=$((number + 1))
done
out=runs/quickstart/$number
mkdir "$out"

export OMP_NUM_THREADS=1  # torchrun warns when it has to choose
for mask in mean gma; do
    printf '\nFedYogi, mask %s, two ranks\n' "$mask"
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 -m fedmpi train \
        --algorithm fedyogi --mask "$mask" --data glyphs --split classes --clients 100 --cohort 10 --rounds 30 \
        --model lenet --threads 1 --out "$out/$mask"
done

printf '\n'
.venv/bin/python -m fedmpi compare "$out/mean" "$out/gma"
printf '\nrun folders: %s\n             %s\n' "$root/$out/mean" "$root/$out/gma"
