"""The headless Service for the pods' host names, which the pods of a replica group use."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.service import HEADLESS, service


def pods_service(resource: MegatronInference) -> dict[str, Any]:
    """Publishes unready addresses, because ranks complete their rendezvous before they are ready."""
    return service(
        resource,
        names.pods_service(resource.name),
        HEADLESS,
        selector={names.NAME_LABEL: resource.name},
        port_name="rendezvous",
        port=names.RENDEZVOUS_PORT,
    )
