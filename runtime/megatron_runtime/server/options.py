"""Options of a frontend process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_runtime.config import InferenceConfig
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.sampling_params import POOLINGS
from megatron_runtime.server.certificate import Certificate
from megatron_runtime.server.generation_choice import check_choice
from megatron_runtime.server.parsers import check_parsers

ACCESS_LOGS = ("off", "text", "json")


@dataclass(frozen=True)
class HttpOptions:
    """Limits and features of the HTTP server. Times are in seconds."""

    max_body_bytes: int = 16 * 2**20
    """Larger bodies are rejected with 413."""
    max_total_body_bytes: int = 256 * 2**20
    """Bytes of the bodies of all requests in progress of a process; see ``held_bodies.py``."""
    body_timeout: float = 60.0
    """A body that takes longer to arrive is rejected with 408."""
    max_in_flight: int = 2048
    """Maximum number of answers in flight per frontend process; further requests are rejected with 429."""
    cors_origins: tuple[str, ...] = ()
    """Origins that CORS allows; ``*`` allows all."""
    access_log: str = "off"
    """Format of the access log, one line per request: ``off``, ``text`` or ``json``."""
    parsers: tuple[str, ...] = ()
    """Parsers for reasoning and tool calls: names in ``parsers.py``, at most one of each kind."""
    media_placeholder: bool = False
    """Whether a text replaces images and other parts of messages that are not text; else they are refused."""
    page: bool = True
    """Whether to serve a web page at ``/``, to chat with the model and to monitor the service."""
    shared_prefix_cache: bool = False
    """Whether requests with different API keys use each other's cached prefixes."""
    picker_metrics_without_key: bool = False
    """Whether ``/metrics`` has the load for endpoint pickers in answers to requests without an API key."""
    megatron_http: bool = False
    """Whether to accept requests as Megatron's server does; see ``megatron_requests.py``."""
    generation_config: str = "auto"
    """Where the sampling defaults come from: see ``generation_config.py``."""
    pooling: str = "last"
    """The hidden states that embeddings are made of: those of the last token (last) or their mean (mean)."""
    trust_request_chat_template: bool = False
    """Whether requests may have a chat template of their own, which is a program."""
    tls_cert: str | None = None
    """PEM file with the certificate of the HTTP port; None: plain HTTP."""
    tls_key: str | None = None
    """PEM file with its private key."""

    @property
    def scheme(self) -> str:
        """The scheme of the URLs of the HTTP port."""
        return "http" if self.tls_cert is None else "https"

    def certificate(self) -> Certificate | None:
        """The certificate of the HTTP port, if it has one; ConfigurationError if it can't be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return Certificate(Path(self.tls_cert), Path(self.tls_key))

    def check(self) -> None:
        """Raises ConfigurationError that names the field, its value and the allowed values."""
        for name in ("max_body_bytes", "body_timeout", "max_in_flight"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be more than 0", field=name)
        if self.max_total_body_bytes < self.max_body_bytes:
            message = f"{self.max_total_body_bytes} bytes are less than --max-body ({self.max_body_bytes} bytes)"
            raise ConfigurationError(f"--max-total-body: {message}; increase it", field="max_total_body_bytes")
        if self.access_log not in ACCESS_LOGS:
            raise ConfigurationError(
                f"access_log={self.access_log!r} must be one of {', '.join(ACCESS_LOGS)}", field="access_log"
            )
        if self.pooling not in POOLINGS:
            raise ConfigurationError(f"--pooling {self.pooling}: use one of {', '.join(POOLINGS)}", field="pooling")
        check_parsers(self.parsers)
        check_choice(self.generation_config)
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.tls_key is None else ("--tls-key", "--tls-cert")
            raise ConfigurationError(f"{given} {self.tls_cert or self.tls_key}: give {missing} too", field="tls_cert")
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                raise ConfigurationError(
                    f"cors_origins: {origin!r} is not an origin; use the form https://example.com, or * for all",
                    field="cors_origins",
                )


@dataclass(frozen=True)
class FrontendOptions:
    """All options except secrets, which are in the environment. Times are in seconds."""

    coordinator_address: str
    tokenizer_path: str
    """GGUF file or checkpoint folder with the tokenizer and the chat template."""
    served_name: str
    max_sequence_length: int
    """Maximum number of tokens of a prompt and its answer together."""
    replicas: int = 2
    """Number of frontend processes."""
    request_timeout: float = 600.0
    """A request that takes longer ends with an error."""
    replica_group_wait: float = 30.0
    """How long a request waits while no replica group is registered."""
    retry_after: int = 5
    api_keys_file: str | None = None
    metrics_folder: str | None = None
    hands_over: bool = False
    """Whether other endpoints can serve the requests when this one drains: it then closes its port instead of answering
    with 503."""
    http: HttpOptions = field(default_factory=HttpOptions)
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """Names and paths of the adapters that the engines start with."""
    max_loras: int = InferenceConfig.max_loras
    """Maximum number of adapters that the engines have at once."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of fields that a request does not have, as from ``generation_config.sampling_defaults``."""

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> FrontendOptions:
        """The inverse of ``serialize``; accepts data that went through JSON."""
        http = data["http"]
        lists = {name: tuple(http[name]) for name in ("cors_origins", "parsers")}
        return cls(**{**data, "http": HttpOptions(**{**http, **lists})})
