#!/usr/bin/env bash
# Installs everything and runs all checks: ruff, mypy, pytest. Arguments are passed to pytest. The number of tests at a
# time is one more than there are cores (at most 4), as many of them wait for a launcher.
#
#   bash launch/test.sh                                                       everything
#   bash launch/test.sh -m "not slow and not processes and not launchers and not accelerator"     the fast tests
#   bash launch/test.sh -k masks
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash launch/setup.sh dev

python=.venv/bin/python
"$python" -m ruff check .
"$python" -m mypy
cores=$(nproc 2>/dev/null || echo 1)
exec "$python" -m pytest -n "$((cores < 3 ? cores + 1 : 4))" --dist loadgroup "$@"
