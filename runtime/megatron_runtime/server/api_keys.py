"""The keys that requests must carry, read from a file with one key per line."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.server.errors import ApiError


class ApiKeys:
    """Follows its file: a key that is added or removed takes effect with the next request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._digests: list[bytes] = []
        try:
            self._refresh()
        except OSError as error:
            raise ConfigurationError(f"MEGATRON_API_KEYS_FILE={path}: can't be read: {error.strerror}") from error

    def check(self, authorization: str | None) -> None:
        """Raises ApiError 401 unless the header carries one of the keys."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        # All keys are compared, in constant time each, so that the time taken says nothing about any of them.
        matches = sum(hmac.compare_digest(given, digest) for digest in self._digests)
        if scheme.lower() != "bearer" or not matches:
            raise ApiError(401, "no valid API key: send one as Authorization: Bearer <key>", code="invalid_api_key")

    def _refresh(self) -> None:
        status = self._path.stat()
        version = (status.st_mtime_ns, status.st_ino)
        if version == self._version:
            return
        lines = (line.strip() for line in self._path.read_text().splitlines())
        self._digests = [_digest(line) for line in lines if line and not line.startswith("#")]
        self._version = version


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
