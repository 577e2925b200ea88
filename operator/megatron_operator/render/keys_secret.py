"""The Secret that the pods of one resource and the operator share."""

from __future__ import annotations

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.observed_state import CreateSecret
from megatron_operator.render.metadata import child_metadata


def keys_secret(resource: MegatronInference) -> CreateSecret:
    """The action that creates the Secret; its values are generated once, at its creation."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": child_metadata(resource, names.keys_secret(resource.name)),
    }
    return CreateSecret(manifest, names.SECRET_KEYS)
