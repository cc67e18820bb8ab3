"""A rendezvous store with authenticated values: every value carries a seal made with a secret that only the ranks have.

The ranks of several nodes connect through a TCP port to which anyone on the network can write. The values are addresses
that gloo connects to; fedmpi unpickles none of them. With the secret FEDMPI_SECRET, which the batch scripts generate
for each start, a value is stored as HMAC-SHA256(secret, key and value) followed by the value, and a wrong seal ends the
run with an error. The counters of `add` are kept by the server and have no seal: an attacker can disturb them, and so
the start of a run, but nothing else.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from ..errors import RunError
from .env import SECRET

SEAL_BYTES = 32


class SealedStore(Store):
    """A store that seals its values."""

    def __init__(self, inner: Store, secret: str) -> None:
        super().__init__()
        self.inner, self.secret = inner, secret.encode()

    def seal(self, key: str, value: bytes) -> bytes:
        """Return the seal of a value under its key."""
        name = key.encode()
        return hmac.digest(self.secret, len(name).to_bytes(8, "big") + name + value, "sha256")

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(key, self.seal(key, raw) + raw)  # type: ignore[arg-type]  # torch takes bytes as well

    def get(self, key: str) -> bytes:
        sealed = self.inner.get(key)
        seal, value = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self.seal(key, value)):
            raise RunError(
                f"the rendezvous store holds '{key}' without the seal of this run: another program writes to its port, "
                f"or the ranks have different values of {SECRET}; restart with one secret for all ranks"
            )
        return value

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.inner.wait(keys) if timeout is None else self.inner.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


def serve(host: str, port: int, size: int, one_node: bool, limit: timedelta) -> TCPStore:
    """Return a store that listens on the address of `host` only; port 0 for a free one.

    Many systems resolve their own host name to a loopback address, at which other nodes cannot reach them. In that case
    on several nodes, and if the address is not this machine's, the store listens on all addresses.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if one_node or not loopback or address[0] == host:
            listening = socket.create_server(address[:2], family=family, backlog=size + 128)
            number = listening.getsockname()[1]
            return TCPStore(
                host, number, size, True, timeout=limit, wait_for_workers=False, master_listen_fd=listening.detach()
            )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RunError(f"rank 0 of {size} found no rendezvous: {host}:{port} is in use") from None
    return TCPStore(host, port, size, True, timeout=limit, wait_for_workers=False)
