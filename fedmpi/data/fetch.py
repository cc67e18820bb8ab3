"""Downloads: to a temporary file, which is then renamed, with timeouts where there is no network."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import urllib.error
import uuid
from pathlib import Path
from urllib.request import Request, urlopen

from tqdm import tqdm

PROBE_SECONDS = 8.0  # a cluster's firewall often drops packets silently
STALL_SECONDS = 30.0
AGENT = {"User-Agent": "fedmpi"}


def fetch_file(urls: list[str], target: Path, md5: str) -> None:
    """Download a file from the first URL that works, check its md5, and rename it into place."""
    probe(urls)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    reasons = []
    for url in urls:
        try:
            with urlopen(Request(url, headers=AGENT), timeout=STALL_SECONDS) as answer, aside.open("wb") as file:
                with tqdm.wrapattr(answer, "read", total=answer.length, disable=None) as shown:  # on a terminal only
                    shutil.copyfileobj(shown, file)
            if hashlib.md5(aside.read_bytes(), usedforsecurity=False).hexdigest() != md5:
                raise OSError(f"the download is corrupt: its md5 is not {md5}")
            os.replace(aside, target)
            return
        except OSError as error:
            reasons.append(f"{url}: {error}")
        finally:
            aside.unlink(missing_ok=True)
    raise ConnectionError("; ".join(reasons))


def probe(urls: list[str], seconds: float = PROBE_SECONDS) -> None:
    """Raise ConnectionError unless one of the servers answers within the time, name lookup included."""
    reasons: list[str] = []

    def ask() -> None:
        for url in urls:
            try:
                urlopen(Request(url, headers=AGENT, method="HEAD"), timeout=seconds).close()
                return
            except urllib.error.HTTPError as error:  # an answer, too
                error.close()
                return
            except (OSError, ValueError) as error:
                reasons.append(str(getattr(error, "reason", error)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive() or len(reasons) == len(urls):
        raise ConnectionError(reasons[0] if reasons else f"no answer from its servers within {seconds:.0f} s")
