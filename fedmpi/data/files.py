"""Source files of data sets: decompression, published checksums, errors for bad files, and downloads."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import shutil
import threading
import urllib.error
import uuid
import zlib
from collections.abc import Iterable
from pathlib import Path
from urllib.request import Request, urlopen

from tqdm import tqdm

from fedmpi.errors import UserError

PROBE_SECONDS = 8.0  # a cluster's firewall often drops packets silently
STALL_SECONDS = 30.0
AGENT = {"User-Agent": "fedmpi"}


def wrong(path: Path, what: str) -> UserError:
    """Return the error for a file that is not as published."""
    return UserError(f"{path} {what}; replace it by the original file")


def damaged(path: Path, error: object) -> UserError:
    """Return the error for a file whose content is broken."""
    return wrong(path, f"is damaged or cut short ({error})")


def unreadable(path: Path, error: OSError) -> UserError:
    """Return the error for a file that the system cannot read."""
    return UserError(f"{path} cannot be read ({error.strerror or error}); make it readable or replace it")


def unpacked(path: Path) -> bytearray:
    """Return the content of a file, decompressed if it ends in .gz or .xz."""
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)
    try:
        return bytearray(unpack(path.read_bytes()))
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise unreadable(path, error) from error


def complete(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return a folder's files of those names, uncompressed or else .gz; [] if one is missing."""
    found = [[f for f in (folder / name, folder / f"{name}.gz") if f.is_file()] for name in names]
    return [files[0] for files in found] if all(found) else []


def read_published(path: Path, size: int, sha256: str) -> bytearray:
    """Return the decompressed content of a file; if it has the published size, it must have the published SHA-256."""
    content = unpacked(path)
    if len(content) == size and hashlib.sha256(content).hexdigest() != sha256:
        raise wrong(path, "is damaged: its SHA-256 is not that of the published file")
    return content


def fetch_file(urls: list[str], target: Path, md5: str) -> None:
    """Download a file from the first URL that works, check its md5, and rename it into place."""
    probe(urls)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    reasons = []
    for url in urls:
        try:
            with urlopen(Request(url, headers=AGENT), timeout=STALL_SECONDS) as answer, aside.open("wb") as file:
                with tqdm.wrapattr(answer, "read", total=answer.length, disable=None) as shown:  # None: on a tty
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
