"""API keys for authentication, read from a file with one key per line."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.server.errors import ApiError

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "MEGATRON_API_KEYS"
"""The environment variable of frontend processes with the keys that are in no file."""
TOKEN_DIGEST_VARIABLE = "MEGATRON_CONTROL_TOKEN_SHA256"
"""The environment variable of frontend processes with the digest of the control token; they never have the token."""


class KeyNames(NamedTuple):
    """What stands for a key outside of the frontends, equal in all of them."""

    cache_salt: str
    """A secret."""
    tenant: str
    """For engines."""


class ApiKeys:
    """Follows its file: a key that is added or removed takes effect with the next request.

    While the file is missing or can't be read, the keys that were read last stay valid. Empty the file to revoke all
    keys.

    Args:
        path: The file; None: there are only ``others``.
        others: Keys that are valid beside those of the file.

    Raises:
        ConfigurationError: The file can't be read.
    """

    def __init__(self, path: Path | None, others: Sequence[str] = ()) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._others = [digest(key) for key in others]
        self._digests = self._others
        self._is_readable = True
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--api-keys-file {path}: can't be read: {_reason(error)}") from error

    @classmethod
    def of_frontend(cls, path: str | None, environment: Mapping[str, str]) -> ApiKeys | None:
        """The keys of a frontend process, from its options and `api_keys_environment`; None: every client is served."""
        others = environment.get(KEYS_VARIABLE, "").split()
        return cls(None if path is None else Path(path), others) if path is not None or others else None

    def check(self, authorization: str | None, key: str | None = None) -> None:
        """Raises ApiError 401 unless ``authorization`` carries one of the keys, or ``key`` is one.

        ``key`` is the header ``X-Api-Key``, for clients behind a proxy that uses ``Authorization`` itself, such as the
        proxy of the Kubernetes API server.
        """
        self._refresh()
        given = _given(authorization, key)
        # All keys are compared, each in constant time, so that the duration reveals nothing about them.
        matches = sum(hmac.compare_digest(each, digest) for each in given for digest in self._digests)
        if not matches:
            message = "no valid API key: send one as Authorization: Bearer <key>, or as X-Api-Key: <key>"
            raise ApiError(401, message, code="invalid_api_key")

    def names(self, authorization: str | None, key: str | None = None) -> KeyNames:
        """The names of the request's key; the arguments are those of ``check``, which passed."""
        given = _given(authorization, key)
        # The key may have been removed since the check.
        matching = (digest for digest in self._digests if any(hmac.compare_digest(each, digest) for each in given))
        used = next(matching, given[0])
        salt, tenant = (hmac.digest(used, purpose, "sha256").hex() for purpose in (b"prefix cache", b"tenant"))
        return KeyNames(salt, tenant[:32])

    def _refresh(self) -> None:
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            if self._is_readable:
                message = "--api-keys-file %s: can't be read: %s; the keys that were read last stay valid"
                logger.warning(message, self._path, _reason(error))
            self._is_readable = False
        else:
            self._is_readable = True

    def _read(self) -> None:
        if self._path is None:
            return
        status = self._path.stat()
        version = (status.st_mtime_ns, status.st_ino)
        if version == self._version:
            return
        lines = (line.strip() for line in self._path.read_text().splitlines())
        self._digests = [digest(line) for line in lines if line and not line.startswith("#")] + self._others
        self._version = version


def api_keys_environment(keys: Sequence[str]) -> dict[str, str]:
    """The environment that passes ``keys``, which have no spaces, to a frontend process."""
    return {KEYS_VARIABLE: " ".join(keys)}


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


def _given(authorization: str | None, key: str | None) -> list[bytes]:
    """The digests of the keys that a request carries."""
    scheme, _, token = (authorization or "").partition(" ")
    return [digest(each.strip()) for each in (token if scheme.lower() == "bearer" else "", key or "")]


def digest(key: str) -> bytes:
    """Of a secret, for comparisons in constant time."""
    return hashlib.sha256(key.encode()).digest()
