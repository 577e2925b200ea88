"""How the OpenAI frontend of the library API is served."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.server.options import HttpOptions


@dataclass
class ServeConfig:
    """Where the frontend listens, and how many processes answer.

    Raises:
        ConfigurationError: A value that can't work, naming the field.
    """

    host: str = "0.0.0.0"
    port: int = 5000
    """0 takes any free port, which ``frontend_address`` of the LLM then tells."""
    parsers: list[str] = field(default_factory=list)
    """What finds reasoning and calls of tools in answers: at most one name of each list in ``server/parsers.py``."""
    verbose: bool = False
    """Logs every request; ``http`` may choose another form than text."""
    frontend_replicas: int = 4
    """Frontend processes; they share the port."""
    sock: socket.socket | None = None
    """A listening socket to use instead of host and port."""
    served_name: str = "model"
    """The name of the model in requests and in /v1/models."""
    request_timeout: float = 600.0
    """Seconds after which a request that is not answered ends with an error."""
    http: HttpOptions = field(default_factory=HttpOptions)
    """Limits on requests, access from pages of other origins, and the access log."""

    def __post_init__(self) -> None:
        if self.verbose and self.http.access_log == "off":
            self.http = replace(self.http, access_log="text")
        if self.parsers:
            self.http = replace(self.http, parsers=tuple(self.parsers))
        self.http.check()
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port={self.port} must be from 0 to 65535", field="port")
        if self.frontend_replicas < 1:
            raise ConfigurationError(
                f"frontend_replicas={self.frontend_replicas} must be at least 1", field="frontend_replicas"
            )
