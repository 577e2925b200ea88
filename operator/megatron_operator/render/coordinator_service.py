"""The headless Service behind the coordinator's address."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.service import HEADLESS, service


def coordinator_service(resource: MegatronInference) -> dict[str, Any]:
    """Publishes unready addresses, because engines register while the leader is starting."""
    return service(
        resource,
        names.coordinator_service(resource.name),
        HEADLESS,
        selector=names.leader_labels(resource.name),
        port_name="coordinator",
        port=names.COORDINATOR_PORT,
    )
