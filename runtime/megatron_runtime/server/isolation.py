"""What separates the requests of different clients from each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from uuid import uuid4

from megatron_runtime.sampling_params import SamplingParams


class Isolation(NamedTuple):
    """Of one request."""

    cache_salt: str | None
    """Requests with different salts do not use each other's cached prefixes; None: shared with all without one."""
    tenant: str | None
    """Requests of different tenants have equal shares of a full engine; None: of one tenant with all without one."""

    def apply(self, params: Iterable[SamplingParams], answers: int) -> None:
        """Set it in the parameters of all ``answers`` that a body asks for."""
        name = uuid4().hex if answers > 1 else None
        for each in params:
            each.cache_salt, each.tenant = self
            each.body, each.answers = name, answers
