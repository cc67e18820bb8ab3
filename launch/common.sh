# What the scripts of launch/ that start ranks share: arguments, and a launcher in whose way signals are not lost.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3

fail() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 2
}

# Sets `ranks` and `restarts` from the front of the arguments, and `rest` to what goes to 'fedmpi train'.
read_arguments() {
    ranks=2 restarts=3
    if (($# > 0)) && [[ $1 =~ ^[1-9][0-9]*$ ]]; then
        ranks=$1
        shift
    fi
    if (($# > 0)) && [[ $1 == --max-restarts || $1 == --max-restarts=* ]]; then
        [[ $1 == *=* ]] && set -- "${1%%=*}" "${1#*=}" "${@:2}"
        [[ ${2-} =~ ^[0-9]+$ ]] || fail "--max-restarts is '${2-}'; it must be a whole number from 0 up"
        restarts=$2
        shift 2
    fi
    rest=("$@")
}

# Runs a launcher and sets `code` to what it ended with. Signals to this script go to the launcher, each once: in a
# group of its own it does not get a Ctrl-C from the terminal too. `asked` is 1 when one of them asked for the end. A
# second Ctrl-C goes to the ranks as well. SIGUSR2 is passed on as SIGTERM, which launchers pass on themselves; it would
# end them.
watch() {
    local presses=0 passed=0
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    trap 'passed=1 asked=1; kill -TERM "$child" 2>/dev/null || true' TERM HUP USR2
    trap 'passed=1 asked=1 presses=$((presses + 1)); interrupt "$presses"' INT
    while :; do
        wait "$child" && code=0 || code=$?
        ((passed)) || break
        passed=0  # a signal ended the wait, not the launcher
    done
    trap - TERM HUP USR2 INT
    ((presses < 2 || code == 0 || code == 75)) || code=130
}

interrupt() {
    (($1 == 1)) || pkill -INT -P "$child" || true
    kill -INT "$child" 2>/dev/null || true
}
