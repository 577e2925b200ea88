"""Resources in the form that users write."""

from __future__ import annotations

from typing import Any

from megatron_operator.api.parse import parse_resource
from megatron_operator.api.v1alpha1 import MegatronInference, MegatronInferenceStatus
from megatron_operator.status import as_json


def resource_object(name: str = "chat", **spec: Any) -> dict[str, Any]:
    """A minimal resource with these fields of its spec."""
    return {
        "apiVersion": "inference.megatron.dev/v1alpha1",
        "kind": "MegatronInference",
        "metadata": {"name": name, "namespace": "models", "uid": "5f9c", "generation": 1},
        "spec": {"model": {"source": {"path": "/models/tiny.gguf"}}, "pods": {"device": "cpu"}, **spec},
    }


def parsed(status: MegatronInferenceStatus | None = None, **spec: Any) -> MegatronInference:
    """The same, parsed, with its status."""
    obj = resource_object(**spec)
    return parse_resource({**obj, "status": as_json(status) if status else {}})
