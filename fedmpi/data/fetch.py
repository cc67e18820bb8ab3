"""Downloads with torchvision's tools: to a temporary folder, then renamed, with timeouts where there is no network."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from fedmpi.plugins.torchvision import import_torchvision

PROBE_SECONDS = 8.0  # a cluster's firewall often drops packets silently
STALL_SECONDS = 30.0


def fetch_file(urls: list[str], target: Path, md5: str) -> None:
    """Download a file from the first URL that works, check its md5, and rename it into place."""
    utils = import_torchvision().datasets.utils
    probe(urls)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as aside:
        reasons = []
        for url in urls:
            try:
                quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
                with socket_timeout(STALL_SECONDS), quiet:  # no progress bar in log files
                    utils.download_url(url, aside, target.name, md5)
                os.replace(Path(aside) / target.name, target)
                return
            except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError for a wrong md5
                reasons.append(f"{url}: {error}")
    raise ConnectionError("; ".join(reasons))


def probe(urls: list[str], seconds: float = PROBE_SECONDS) -> None:
    """Raise ConnectionError unless one of the servers answers within the time, name lookup included."""
    answered, done = threading.Event(), threading.Event()
    reasons: list[str] = []

    def ask() -> None:
        for url in urls:
            try:
                urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
            except urllib.error.HTTPError as error:  # an answer, too
                error.close()
            except (OSError, ValueError) as error:
                reasons.append(str(getattr(error, "reason", error)))
                continue
            answered.set()
            break
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    done.wait(seconds)
    if not answered.is_set():
        raise ConnectionError(reasons[0] if reasons else f"no answer from its servers within {seconds:.0f} s")


@contextlib.contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """Set a timeout for new sockets: torchvision sets none, and a stalled download would hang forever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
