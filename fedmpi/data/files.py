"""Read source files of data sets: decompression, published checksums, and the error messages for bad files."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterable
from pathlib import Path

from fedmpi.errors import UserError


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
