"""The configuration of the library API's OpenAI frontend."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.generation_config import sampling_defaults
from megatron_runtime.server.listening_socket import bind
from megatron_runtime.server.options import FrontendOptions, HttpOptions


@dataclass
class ServeConfig:
    """Address, processes and limits of the frontend.

    Raises:
        ConfigurationError: A value is invalid; the error names the field.
    """

    host: str = "0.0.0.0"
    port: int = 5000
    """0 means any free port; ``frontend_address`` of the LLM has the actual one."""
    parsers: list[str] = field(default_factory=list)
    """Parsers of reasoning and tool calls in answers: at most one name of each list in ``server/parsers.py``."""
    verbose: bool = False
    """Logs every request as text, unless ``http`` sets another format."""
    frontend_replicas: int = 4
    """Frontend processes; they share the port."""
    sock: socket.socket | None = None
    """A listening socket to use instead of host and port."""
    served_name: str = "model"
    """The name of the model in requests and in /v1/models."""
    request_timeout: float = 600.0
    """Seconds after which an unanswered request ends with an error."""
    http: HttpOptions = field(default_factory=lambda: HttpOptions(megatron_http=True))
    """Limits of requests, CORS, and the access log. By default requests are accepted as by Megatron's server."""

    def frontend_options(
        self, coordinator_address: str, tokenizer: Tokenizer, max_sequence_length: int
    ) -> FrontendOptions:
        """The options of the frontends for a coordinator.

        Raises:
            ConfigurationError: The tokenizer was not read from a file, or its sampling defaults are invalid.
        """
        return FrontendOptions(
            coordinator_address=coordinator_address,
            tokenizer_path=tokenizer.location,
            served_name=self.served_name,
            max_sequence_length=max_sequence_length,
            replicas=self.frontend_replicas,
            request_timeout=self.request_timeout,
            http=self.http,
            sampling_defaults=sampling_defaults(self.http, tokenizer.location),
        )

    def listening_socket(self) -> socket.socket:
        """The socket of the frontends. Raises ConfigurationError if the address can't be used."""
        return self.sock or bind(self.host, self.port, self.port, flag="port", may_move=False)

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
