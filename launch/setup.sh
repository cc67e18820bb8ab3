#!/usr/bin/env bash
# Creates .venv in the root of the checkout and installs fedmpi in it, in development mode, with the versions of
# constraints.txt. Does nothing if nothing has changed since the last time; repairs an interrupted installation.
#
#   bash launch/setup.sh [run|test|dev]
#
#   run: what running needs, including MPICH; test: also what testing needs (default); dev: also ruff and mypy
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-test}
venv=$root/.venv
unfinished=$root/.venv.unfinished

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 2; }

case $extra in
    run) holds=(run) ;;
    test) holds=(run test) ;;
    dev) holds=(run test dev) ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown extra '$extra'; known: dev, run, test" ;;
esac

# What the installation depends on: when this changes, it is repeated. The path is included: a virtual environment and a
# development install both contain it.
fingerprint() {
    { printf '%s\n' "$root"; cat "$root/setup.py" "$root/constraints.txt" "$root/pyproject.toml"; } | cksum
}

find_python() {
    local name
    for name in python3.11 python3 python3.12 python3.13 python3.10 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    local found
    found=$(python3 --version 2>/dev/null || echo none)
    fail "needs Python 3.10 or newer and found $found; install one, or put it first in PATH"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; install its venv package (Debian: apt-get install python3-venv)"
    say "creating .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

# Two set-ups at once would interfere: the second waits, and then finds everything installed.
if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    flock 9
fi

if [[ -e $unfinished ]]; then
    say "the last set-up was interrupted: starting over"
    rm -rf "$venv"
fi

print=$(fingerprint)
if [[ -x $venv/bin/python && $(cat "$venv/fedmpi-$extra.stamp" 2>/dev/null) == "$print" ]]; then
    say "nothing to do"
    exit 0
fi

touch "$unfinished"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
say "installing fedmpi[$extra] (takes minutes the first time: torch is large)"
quiet=(-qq)
if [[ $extra == run || -t 1 ]]; then  # somebody is watching
    quiet=()
fi
# When pip itself fails (no network, say), what was installed before is intact; only a killed pip leaves a broken state.
trap 'exit 130' INT
trap 'exit 143' TERM
"$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check -c "$root/constraints.txt" -e "$root[$extra]" || {
    rm "$unfinished"
    fail "pip could not install fedmpi[$extra], see above; fix that and start again"
}
say "checking that torch starts"
"$venv/bin/python" -c 'import torch; torch.ones(1).sum()'
# Some indexes combine a torch for the CPU with a torchvision for CUDA, which do not fit; PyTorch's own index has both.
say "checking that torchvision fits torch"
if ! "$venv/bin/python" -m fedmpi.plugins.torchvision 2>/dev/null; then
    read -r pair build < <("$venv/bin/python" -c 'import torch, fedmpi.plugins.torchvision as i
print(i.torchvision_build().partition("+")[0] or "none", torch.__version__.partition("+")[2] or "none")')
    if [[ $pair != none && $build != none && -z ${FEDMPI_OFFLINE:-} ]]; then
        say "it does not: trying to install torchvision $pair+$build"
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --retries 0 --timeout 15 \
            --index-url "https://download.pytorch.org/whl/$build" "torchvision==$pair+$build" 2>/dev/null || true
    fi
    "$venv/bin/python" -m fedmpi.plugins.torchvision 2> >(sed 's/^/setup: WARNING: /' >&2) || true
fi
for one in "${holds[@]}"; do  # dev includes test, and test includes run
    printf '%s\n' "$print" >"$venv/fedmpi-$one.stamp"
done
rm "$unfinished"
say "done"
