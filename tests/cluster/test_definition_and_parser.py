"""The CRD on an API server and the operator's parser reject the same resources."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from cluster_support.cluster import Cluster
from operator_support.api import Api, ApiFailure
from operator_support.field_values import Trial, trials
from operator_support.resource import Json

from megatron_operator.api.crd import crd
from megatron_operator.api.parse import InvalidResource, parse_resource

SPEC = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
AT_A_TIME = 16
pytestmark = pytest.mark.usefixtures("ruled")


def refusal_by_the_operator(resource: Json) -> str | None:
    try:
        parse_resource(resource)
    except InvalidResource as refused:
        return str(refused)
    return None


async def disagreement(api: Api, namespace: str, trial: Trial) -> str | None:
    """A message if they disagree. The operator reads the object that the API server stored, or else the user's."""
    path = f"/apis/inference.megatron.dev/v1alpha1/namespaces/{namespace}/megatroninferences"
    resource = trial.resource()
    try:
        stored = await api.post(f"{path}?dryRun=All&fieldValidation=Strict", resource)
    except ApiFailure as refused:
        if refused.status not in (400, 422):
            raise
        taken = refusal_by_the_operator(resource) is None
        return f"{trial}: the operator takes what the API server refuses: {refused}" if taken else None
    words = refusal_by_the_operator(stored)
    return f"{trial}: the API server takes what the operator refuses: {words}" if words else None


async def disagreements(api: Api, namespace: str, tried: Iterator[Trial]) -> list[str]:
    async def work() -> list[str]:
        return [words for trial in tried if (words := await disagreement(api, namespace, trial))]

    return [words for part in await asyncio.gather(*(work() for _ in range(AT_A_TIME))) for words in part]


async def test_the_api_server_and_the_parser_agree_on_every_field(ruled: Cluster, namespace: str) -> None:
    # Thousands of requests: the proxy of the core would add a fifth of their time.
    async with Api(ruled.custom_resources_kubeconfig) as api:
        found = await disagreements(api, namespace, trials(SPEC))
    fields = Counter(words.partition(": ")[0] for words in found)
    assert found == [], f"{len(found)} disagreements, by field: {dict(fields)}"


def test_every_field_of_the_spec_is_tried_with_good_and_with_bad_values() -> None:
    verdicts: dict[tuple[str | int, ...], set[bool]] = {}
    for trial in trials(SPEC):
        verdicts.setdefault(trial.path, set()).add(refusal_by_the_operator(trial.resource()) is None)
    assert len(verdicts) > 80
    assert {path for path, seen in verdicts.items() if seen != {True, False}} == set()
