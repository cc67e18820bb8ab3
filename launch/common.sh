# Shared by the scripts of launch/ that start ranks: arguments, and a launcher that receives every signal.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3

fail() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 2
}

# Sets `ranks` and `restarts` from the first arguments, and `rest` to the arguments of 'fedmpi train'.
read_arguments() {
    ranks=2 restarts=3
    if (($# > 0)) && [[ $1 =~ ^([1-9][0-9]*|auto)$ ]]; then
        ranks=$1
        shift
    fi
    if (($# > 0)) && [[ $1 == --max-restarts || $1 == --max-restarts=* ]]; then
        [[ $1 == *=* ]] && set -- "${1%%=*}" "${1#*=}" "${@:2}"
        [[ ${2-} =~ ^[0-9]+$ ]] || fail "--max-restarts is '${2-}'; it must be a whole number of at least 0"
        restarts=$2
        shift 2
    fi
    rest=("$@")
}

# Runs a launcher and sets `code` to its exit code. Signals to this script are forwarded to the launcher, each once: it
# has its own process group, so it does not get a Ctrl-C from the terminal as well. `signalled` is 1 after that. A
# second Ctrl-C is also sent to the ranks. SIGUSR2 would end launchers, so it is forwarded as SIGTERM, which they
# forward to the ranks.
watch() {
    local presses=0 caught=0
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    trap 'caught=1 signalled=1; kill -TERM "$child" 2>/dev/null || true' TERM HUP USR2
    trap 'caught=1 signalled=1 presses=$((presses + 1)); interrupt "$presses"' INT
    while :; do
        wait "$child" && code=0 || code=$?
        ((caught)) || break
        caught=0  # a signal ended the wait, the launcher is still running
    done
    trap - TERM HUP USR2 INT
    ((presses < 2 || code == 0 || code == 75)) || code=130
}

interrupt() {
    (($1 == 1)) || pkill -INT -P "$child" || true
    kill -INT "$child" 2>/dev/null || true
}
