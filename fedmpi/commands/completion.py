"""`fedmpi completion bash|zsh`: print a script that completes commands, options and names.

The script is static: pressing TAB starts no Python. Options are read from the help of each command, names from the
tables of algorithms, masks, data sets, models and splits.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import UserError, unknown
from ..plugins.knobs import walk
from ..runs.options import positional, read_options, recipes

SHELLS = ("bash", "zsh")
ABOUT = "Print a script that completes commands, options and names in bash or zsh."
NOTES = """Install it once with 'fedmpi completion bash > ~/.local/share/bash-completion/completions/fedmpi', or in zsh
with 'fedmpi completion zsh > ~/.fedmpi-completion' and 'source ~/.fedmpi-completion' in ~/.zshrc."""

SCRIPT = """\
_fedmpi() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words= i
    COMPREPLY=()
    if [[ $cur == "=" ]]; then
        cur=
    elif [[ $prev == "=" ]]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$cur"))
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do  # 'submit ... -- train ...' completes like train
        if [[ ${COMP_WORDS[i]} == "--" ]]; then command=train; fi
    done
    if [[ $cur == -* ]]; then
        case $command in
@OPTIONS@
        esac
    elif [[ $prev == -* ]]; then
        case $prev in
@VALUES@
        esac
    else
        case $command:$COMP_CWORD in
@NAMES@
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o bashdefault -o default -F _fedmpi fedmpi
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Options of `fedmpi completion`."""

    shell: str = positional("SHELL")
    """bash or zsh."""


def main(arguments: list[str]) -> int:
    """`fedmpi completion SHELL`: print the script; return the exit code."""
    options = read_options(CompletionOptions, arguments, "completion", ABOUT, usage="bash|zsh", notes=NOTES)
    if not options.shell:
        raise UserError("completion needs the name of a shell: fedmpi completion bash")
    if options.shell not in SHELLS:
        raise unknown("shell", options.shell, SHELLS)
    head = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" if options.shell == "zsh" else ""
    print(head + script(), end="", flush=True)
    return 0


def script() -> str:
    """Return the script for bash; zsh runs it through bashcompinit."""
    from . import COMMANDS
    from .data import COMMANDS as DATA_COMMANDS

    options = {command: options_in_help(command) for command in COMMANDS if command not in ("train", "plan", "data")}
    options["train"] = [*options_in_help("train", "--help-all"), "--help", "--help-all"]
    options["plan"] = [*options["train"], *options_in_help("plan")]
    options["data"] = [word for command in DATA_COMMANDS for word in options_in_help("data", command)]
    names: dict[str, Iterable[str]] = {
        "help:2": COMMANDS,
        "completion:2": SHELLS,
        "recipes:2": recipes(),
        "sweep:2": recipes(),
        "data:2": DATA_COMMANDS,
        "data:*": tables()["--data"],
    }
    text = SCRIPT.replace("@COMMANDS@", " ".join([*COMMANDS, "help"]))
    text = text.replace("@VALUES@", cases(tables())).replace("@OPTIONS@", cases(options))
    return text.replace("@NAMES@", cases(names))


def options_in_help(*command: str) -> list[str]:
    """Return the options that the help of a command lists."""
    from . import dispatch

    printed = io.StringIO()
    name, *words = command
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        dispatch(name, [*words, "--help"])
    return re.findall(r"^  (?:-\w(?: \w+)?, )?(--[\w.]+)", printed.getvalue(), re.MULTILINE)


def tables() -> dict[str, Iterable[str]]:
    """Return the names that an option takes, by option."""
    from ..algorithms import ALGORITHMS
    from ..comm.transports import TRANSPORTS
    from ..data import DATASETS, SPLITS
    from ..local import RULES as LOCAL_RULES
    from ..masks import MASKS
    from ..models import MODELS
    from ..runs.config import Config
    from ..runs.sinks import SINKS
    from ..server import RULES as SERVER_RULES

    listed = {f"--{name}": f.metadata["choices"] for name, f, _ in walk(Config()) if f.metadata.get("choices")}
    return listed | {
        "--algorithm": ALGORITHMS,
        "--mask": MASKS,
        "--data": DATASETS,
        "--model": MODELS,
        "--split": SPLITS,
        "--local.rule": LOCAL_RULES,
        "--server.rule": SERVER_RULES,
        "--comm": TRANSPORTS,
        "--device": ("auto", "cpu", "cuda"),
        "--config": recipes(),
        "--log_to": (*SINKS, "none"),
    }


def cases(words: Mapping[str, Iterable[str]]) -> str:
    """Return the branches of a shell `case` that set `words`."""
    return "\n".join(f'            {case}) words="{" ".join(dict.fromkeys(some))}" ;;' for case, some in words.items())
