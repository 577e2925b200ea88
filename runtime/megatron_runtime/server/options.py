"""What a frontend process has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


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
    verbose: bool = False
    """Logs every request."""

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> FrontendOptions:
        """The options that ``serialize`` was called on."""
        return cls(**data)
