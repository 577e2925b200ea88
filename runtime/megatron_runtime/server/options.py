"""What a frontend process has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.server.parsers import check_parsers

ACCESS_LOGS = ("off", "text", "json")


@dataclass(frozen=True)
class HttpOptions:
    """How HTTP requests are taken and answered, whatever they ask for. Times are seconds."""

    max_body_bytes: int = 16 * 2**20
    """Larger bodies are refused with 413."""
    body_timeout: float = 60.0
    """A body that is not here by then is refused with 408."""
    max_in_flight: int = 2048
    """Answers that one frontend process works on at a time; requests for more are refused with 429."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may read answers in a browser; ``*`` means all."""
    access_log: str = "off"
    """A line per request: ``off``, ``text`` or ``json``."""
    parsers: tuple[str, ...] = ()
    """What finds reasoning and calls of tools in the model's words: names of ``parsers.py``, one of each kind."""
    page: bool = True
    """Whether ``/`` is a page to chat with the model and to watch the service."""

    def check(self) -> None:
        """Raises ConfigurationError naming the field, its value and what it may be."""
        for name in ("max_body_bytes", "body_timeout", "max_in_flight"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be more than 0", field=name)
        if self.access_log not in ACCESS_LOGS:
            raise ConfigurationError(
                f"access_log={self.access_log!r} must be one of {', '.join(ACCESS_LOGS)}", field="access_log"
            )
        check_parsers(self.parsers)
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                raise ConfigurationError(
                    f"cors_origins: {origin!r} is no origin; write it like https://example.com, or * for all",
                    field="cors_origins",
                )


@dataclass(frozen=True)
class FrontendOptions:
    """Everything but secrets; those travel in the environment. Times are seconds."""

    coordinator_address: str
    tokenizer_path: str
    """GGUF file or checkpoint folder that the tokenizer and the chat template are read from."""
    served_name: str
    max_sequence_length: int
    """Most tokens of a prompt and its answer together."""
    replicas: int = 2
    """Frontend processes."""
    request_timeout: float = 600.0
    """A request that is not answered by then ends with an error."""
    replica_wait: float = 30.0
    """How long a request waits while no replica is registered."""
    retry_after: int = 5
    api_keys_file: str | None = None
    metrics_folder: str | None = None
    hands_over: bool = False
    """Whether other endpoints take the requests that this one gets no more: it then closes its port when it drains,
    instead of answering that it shuts down."""
    http: HttpOptions = field(default_factory=HttpOptions)

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> FrontendOptions:
        """The options that ``serialize`` was called on, also after a turn through JSON."""
        http = data["http"]
        lists = {name: tuple(http[name]) for name in ("cors_origins", "parsers")}
        return cls(**{**data, "http": HttpOptions(**{**http, **lists})})
