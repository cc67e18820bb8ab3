# Shared by slurm/local/up and slurm/local/down. A cluster is a folder with its settings, its logs, and one process id
# file per daemon.
# shellcheck shell=bash

MARK=made-by-slurm-local-up  # only a folder with this file is ever removed; it contains the number of nodes
PATH=$PATH:/usr/sbin:/sbin
unset "${!SLURM_@}"  # ignore the settings of another Slurm in whose job this runs

# Prints the folder of the cluster as an absolute path.
box_folder() {
    realpath -ms -- "${1:-${TMPDIR:-/tmp}/fedmpi-slurm-$(id -u)}"
}

# Prints the daemons of a folder, as the names of their process id files.
daemons() {
    local n nodes
    nodes=$(cat "$1/$MARK")
    echo munge
    echo slurmctld
    for ((n = 1; n <= ${nodes:-0}; n++)); do
        echo "slurmd-127.0.0.$n"
    done
}

# Prints the process id of a daemon, nothing if it is not running. The number may have been reused by another process,
# so the command line must name this folder.
process_of() {
    local pid
    pid=$(cat "$1/$2.pid" 2>/dev/null) || return 0
    [[ $pid =~ ^[0-9]+$ ]] || return 0
    if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$1/"; then
        echo "$pid"
    fi
}

# Prints the running daemons of a folder.
living() {
    local daemon
    for daemon in $(daemons "$1"); do
        [[ -z $(process_of "$1" "$daemon") ]] || echo "$daemon"
    done
}

# Starts the daemons.
start_daemons() {
    local dir=$1 daemon node
    export SLURM_CONF=$dir/slurm.conf
    head -c 1024 /dev/urandom >"$dir/munge.key"
    for daemon in $(daemons "$dir"); do
        case $daemon in
            munge)  # --force: munged would require that everybody can enter the folder
                munged --force --num-threads=2 --socket="$dir/munge.sock" --key-file="$dir/munge.key" \
                    --pid-file="$dir/munge.pid" --log-file="$dir/munge.log" --seed-file="$dir/munge.seed" ;;
            slurmctld)
                mkdir -p "$dir/state"
                slurmctld -f "$dir/slurm.conf" -c ;;
            slurmd-*)
                node=${daemon#slurmd-}
                mkdir -p "$dir/spool-$node" "$dir/tmp-$node"
                slurmd -f "$dir/slurm.conf" -N "$node" ;;
        esac >>"$dir/start.log" 2>&1 </dev/null || return 1
    done
}

# Ends the daemons: slurmd before slurmctld before munged. One that does not exit within 10 seconds is killed.
end_daemons() {
    local dir=$1 daemon pid
    for daemon in $(daemons "$dir" | tac); do
        pid=$(process_of "$dir" "$daemon")
        [[ -n $pid ]] || continue
        kill "$pid" 2>/dev/null || true
        for _ in {1..100}; do
            [[ -n $(process_of "$dir" "$daemon") ]] || break
            sleep 0.1
        done
        [[ -z $(process_of "$dir" "$daemon") ]] || kill -9 "$pid" 2>/dev/null || true
    done
}

# Prints the processes of this cluster's jobs: their environment names its settings, and a job unless it is Slurm's own.
strays() {
    local file pid
    for file in $(grep -lzFxs "SLURM_CONF=$1/slurm.conf" /proc/[0-9]*/environ); do
        pid=${file//[!0-9]/}
        if grep -qzs '^SLURM_JOB_ID=' "$file" || [[ $(cat "/proc/$pid/comm" 2>/dev/null) == slurms*d ]]; then
            [[ $pid == "$$" ]] || echo "$pid"
        fi
    done
}

# Ends what is left of jobs when the daemons are gone, which happens if a daemon died before its jobs.
end_strays() {
    local sent pids
    for sent in TERM KILL; do
        for _ in {1..20}; do
            pids=$(strays "$1")
            [[ -n $pids ]] || return 0
            # shellcheck disable=SC2086  # one word per process
            kill "-$sent" $pids 2>/dev/null || true
            sleep 0.1
        done
    done
}
