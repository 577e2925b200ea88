"""Generated keys of coordinators on this machine, in files that only their user can read.

Megatron's coordinators have no keys, and its clients need only an address. So that such programs run unchanged, and
other users of the machine still can't connect, a coordinator that gets no key generates one, and clients of the same
user find it by the port.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from megatron_runtime.wire.security import KEY_VARIABLE, coordinator_address, is_loopback

logger = logging.getLogger(__name__)

_known: dict[str, str] = {}
"""Keys that this process has got for coordinators, by their addresses."""


def generate_key() -> str:
    """A random key; it has more than the least number of characters."""
    return secrets.token_urlsafe(32)


def remember_key(address: int | str, key: str) -> None:
    """Let `find_key` return ``key`` in this process."""
    _known[coordinator_address(address)] = key


def forget_key(address: int | str) -> None:
    """Undo `remember_key`."""
    _known.pop(coordinator_address(address), None)


def find_key(address: int | str) -> str | None:
    """The key of the coordinator at this address: of this process, of the environment, or of a file; None without."""
    address = coordinator_address(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if (known := _known.get(address) or os.environ.get(KEY_VARIABLE)) is not None:
        return known
    return _read(port) if is_loopback(host) else None


def publish_key(address: str, key: str) -> None:
    """Write the key of the coordinator that listens at this address, for clients of the same user."""
    path = _path(address.rpartition(":")[2])
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(key)
        new.replace(path)
    except OSError as error:
        logger.warning("%s: can't be written (%s): only clients with the key can connect to %s", path, error, address)


def withdraw_key(address: str) -> None:
    """Remove the file of a coordinator that ends, or of an earlier one at this address."""
    with contextlib.suppress(OSError):
        _path(address.rpartition(":")[2]).unlink()


def _read(port: str) -> str | None:
    path = _path(port)
    try:
        _check_folder(path.parent)
        return path.read_text() or None
    except OSError:
        return None


def _path(port: str) -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"megatron-{os.getuid()}" / f"coordinator-{port}.key"


def _check_folder(folder: Path) -> None:
    """In a folder that everyone may write to, another user may have created this name first."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only its user can use")
