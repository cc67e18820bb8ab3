#!/usr/bin/env bash
# From a fresh checkout to two trained models: FedYogi on generated digits, 100 clients with two classes each, on two
# ranks; once with the plain mean and once with gradient masked averaging. Prints a table of both at the end.
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
bash launch/setup.sh run

# A run folder is never overwritten, so each quickstart uses the next free number.
mkdir -p runs/quickstart
number=1
while [[ -e runs/quickstart/$number ]]; do
    number=$((number + 1))
done
out=runs/quickstart/$number
mkdir "$out"

for mask in mean gma; do
    printf '\nFedYogi, mask %s, two ranks\n' "$mask"
    .venv/bin/python -m fedmpi train --ranks 2 --algorithm fedyogi --mask "$mask" --data glyphs --split classes \
        --clients 100 --cohort 10 --rounds 30 --model lenet --threads 1 --out "$out/$mask"
done

printf '\n'
.venv/bin/python -m fedmpi compare "$out/mean" "$out/gma"
cat <<END

The runs are in $out/mean and $out/gma. Next steps, in $root:

  source .venv/bin/activate                       # then 'fedmpi' is a command
  fedmpi compare $out/*             # the table again
  fedmpi report $out --out report   # curves and tables: open report/index.html
  fedmpi train --data glyphs --rounds 50          # a run of your own; 'fedmpi help train' shows the options
  fedmpi doctor                                   # check this machine's installation
  bash launch/test.sh                             # all tests; installs their dependencies

docs/own-data.md: your own data and model, and fedmpi.train in Python. docs/tutorial.md: sweeps and reports.
END
