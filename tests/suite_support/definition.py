"""The CRD as older API servers store it."""

from typing import Any

RULES = "x-kubernetes-validations"


def without_rules(node: Any) -> Any:
    """A CRD as API servers before 1.25 store it."""
    if isinstance(node, dict):
        return {key: without_rules(each) for key, each in node.items() if key != RULES}
    return [without_rules(each) for each in node] if isinstance(node, list) else node
