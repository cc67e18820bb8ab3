#!/usr/bin/env bash
# Sets up and runs every check: ruff, mypy, pytest (as many tests at a time as there are cores, at most 4). Arguments go
# to pytest.
#
#   bash launch/test.sh                                                       everything
#   bash launch/test.sh -m "not slow and not processes and not launchers"     the fast tests
#   bash launch/test.sh -k masks
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash launch/setup.sh dev

python=.venv/bin/python
"$python" -m ruff check .
"$python" -m mypy
exec "$python" -m pytest -n auto --maxprocesses=4 --dist loadgroup "$@"
