"""The TLS certificate of the HTTP port."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from megatron_runtime.errors import ConfigurationError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""Time between two looks at the files."""


class Certificate:
    """A certificate chain and its private key, in PEM files; new connections use renewed files.

    Args:
        chain: File with the certificate, followed by those of intermediate authorities.
        key: File with its private key, without a passphrase.

    Raises:
        ConfigurationError: A file can't be read, or the key does not belong to the certificate.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        """For server sockets: TLS 1.2 or newer."""
        self.context.set_alpn_protocols(["http/1.1"])
        self._versions = self._read_versions()
        self._load(self.context)

    async def follow(self) -> None:
        """Load the files again whenever they change, until cancelled; invalid ones leave the last pair in use."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Load the files again if they have changed."""
        try:
            versions = self._read_versions()
            if versions == self._versions:
                return
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))  # a failure would leave half of a pair
            self._load(self.context)
        except ConfigurationError as error:
            logger.warning("%s; the last certificate stays in use", error)
            return
        self._versions = versions
        logger.info("loaded the renewed certificate %s", self._chain)

    def _read_versions(self) -> list[tuple[int, int]]:
        versions = []
        for flag, path in (("--tls-cert", self._chain), ("--tls-key", self._key)):
            try:
                status = path.stat()
                path.open("rb").close()
            except OSError as error:
                raise ConfigurationError(f"{flag} {path}: can't be read: {error.strerror}") from error
            versions.append((status.st_mtime_ns, status.st_ino))
        return versions

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._chain, self._key, password=self._refuse_passphrase)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or error.strerror or error
            message = f"--tls-cert {self._chain}, --tls-key {self._key}: not a PEM certificate and its key: {reason}"
            raise ConfigurationError(message) from error

    def _refuse_passphrase(self) -> str:
        raise ConfigurationError(f"--tls-key {self._key}: has a passphrase; give a key without one")
