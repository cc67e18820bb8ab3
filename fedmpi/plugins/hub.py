"""Transformers, peft and datasets, imported when they are first needed; models and data sets in folders and in the
user's cache of Hugging Face.

Nothing is downloaded in a run: compute nodes often have no network, and every rank would ask for the same files. Code
that comes with a model or a data set is never run, and weights are read from safetensors only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError, one_line

T = TypeVar("T")

HUB = "hf:"
PACKAGES = ("transformers", "peft", "datasets")  # the extra `llm`
SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

_lock = threading.RLock()  # the settings of these libraries belong to the process, and ranks may be threads


def on_hub(name: str | None) -> bool:
    """Return whether a name is that of a model or a data set of Hugging Face."""
    return name is not None and name.startswith(HUB)


def check_installed(what: str, names: Sequence[str] = PACKAGES) -> None:
    """Refuse an option that needs the extra if one of these packages is missing. Nothing is imported."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        are = "is" if len(missing) == 1 else "are"
        raise UserError(f"{what} needs {' and '.join(missing)}, which {are} not installed; pip install 'fedmpi[llm]'")


def package(name: str) -> Any:
    """Return one of the packages."""
    check_installed(name, [name])
    from .torchvision import ready_torchvision  # transformers imports torchvision

    ready_torchvision()
    return importlib.import_module(name)


@contextmanager
def offline() -> Iterator[None]:
    """Keep these libraries from the network, and their progress bars and reports from the terminal."""
    logs: Any = package("transformers").utils.logging
    constants: Any = importlib.import_module("huggingface_hub.constants")
    datasets: Any = sys.modules.get("datasets")  # imported by who uses it
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of one library about another
        bars = datasets is not None and not datasets.are_progress_bars_disabled()
        level = None if datasets is None else datasets.logging.get_verbosity()
        before = constants.HF_HUB_OFFLINE, logs.get_verbosity(), logs.is_progress_bar_enabled()
        constants.HF_HUB_OFFLINE = True
        logs.set_verbosity_error()
        logs.disable_progress_bar()
        if datasets is not None:
            datasets.logging.set_verbosity_error()
            datasets.disable_progress_bars()
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before[0]
            logs.set_verbosity(before[1])
            if before[2]:
                logs.enable_progress_bar()
            if bars:
                datasets.enable_progress_bars()
            if datasets is not None:
                datasets.logging.set_verbosity(level)


def read(what: str, work: Callable[[], T]) -> T:
    """Return what one of these libraries reads; turn what it raises into a `UserError`."""
    with offline():
        try:
            return work()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{what} cannot be loaded: {type(error).__name__}: {one_line(error)[:300]}") from error


def find(kind: str, name: str, file: str = "config.json") -> str:
    """Return the folder that a name means, or the name if the cache has that file of it; `kind` is for messages."""
    place = name.removeprefix(HUB)
    folder = Path(place).expanduser()
    if place and folder.exists():
        return str(folder)
    check_name(kind, name, place)
    check_installed(f"{kind} '{name}'")
    cache = importlib.import_module("huggingface_hub")
    if not isinstance(cache.try_to_load_from_cache(place, file), str):
        raise missing(kind, name, f"hf download {place}")
    return place


def find_data(name: str) -> str:
    """Return the folder of a data set, or its name if the cache has what `datasets` made of it."""
    place = name.removeprefix(HUB)
    folder = Path(place).expanduser()
    if place and folder.is_dir():
        return str(folder)
    check_name("data set", name, place)
    cache, datasets = importlib.import_module("huggingface_hub"), package("datasets")
    try:
        return str(cache.snapshot_download(place, repo_type="dataset", local_files_only=True))
    except cache.errors.LocalEntryNotFoundError:
        pass  # it may have been loaded from elsewhere
    try:
        datasets.load_dataset_builder(place)
    except (ConnectionError, FileNotFoundError):
        raise missing("data set", name, f"hf download --repo-type dataset {place}") from None
    return place


def check_name(kind: str, name: str, place: str) -> None:
    """Refuse what looks like a folder that does not exist."""
    if not place or place.startswith((".", "/", "~")) or place.count("/") > 1:
        raise UserError(f"{kind} '{name}': there is no folder '{place}'; give one, or a name as hf:OWNER/NAME")


def missing(kind: str, name: str, command: str) -> UserError:
    """Return the error for a name that is not in the cache."""
    constants = importlib.import_module("huggingface_hub.constants")
    return UserError(
        f"{kind} '{name}' is neither a folder here nor in the cache ({constants.HF_HUB_CACHE}), and a run downloads "
        f"nothing; run '{command}' where there is a network, or give a folder"
    )


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model."""
    what = f"the tokenizer of '{name}'"
    place = find("tokenizer", name, "tokenizer_config.json")
    auto = package("transformers").AutoTokenizer
    return read(what, lambda: auto.from_pretrained(place, **SAFE))


def padding(tokenizer: Any, name: str, pad: str | None, why: str) -> int:
    """Return the index of the padding token: the tokenizer's, or the one that --text.pad names."""
    if pad is None:
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"the tokenizer of '{name}' has no padding token, and {why} needs one; give --text.pad eos, or another "
                "token of it (padding is masked, and does not count), or --text.pack true for blocks of one length"
            )
        return int(tokenizer.pad_token_id)
    word = tokenizer.eos_token if pad == "eos" else pad
    index = None if word is None else tokenizer.get_vocab().get(word)
    if index is None:
        raise UserError(f"--text.pad is '{pad}', which is no token of '{name}'; give one of its vocabulary, or eos")
    return int(index)
