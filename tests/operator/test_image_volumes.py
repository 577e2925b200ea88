"""Detection of support for image volumes from the answers of an API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from planning_support.resources import parsed

from megatron_operator.kubernetes.api_server import ApiServer, ServerRefusal
from megatron_operator.kubernetes.image_volumes import ImageVolumes
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import ActionRefused
from megatron_operator.render import render_pod
from megatron_operator.settings import Settings

Json = dict[str, Any]
IMAGE = {"image": {"reference": "registry/m:1"}}


class Server:
    """Gives the answers of API servers of several versions; a recent one is not available here."""

    def __init__(self, answer: Callable[[Json], Json]) -> None:
        self.answer = answer
        self.tried = 0

    async def create(self, manifest: Json, *, dry_run: bool) -> Json:
        assert dry_run, "a check makes nothing"
        self.tried += 1
        return self.answer(manifest)


def recent(pod: Json) -> Json:
    return pod


def before_1_31(pod: Json) -> Json:
    """Does not know the field, and stores a volume without source as an emptyDir."""
    volumes = [each if "image" not in each else {"name": each["name"], "emptyDir": {}} for each in volumes_of(pod)]
    return {**pod, "spec": {**pod["spec"], "volumes": volumes}}


def without_the_gate(_pod: Json) -> Json:
    raise ServerRefusal('Pod "x" is invalid: spec.volumes[3]: Required value: must specify a volume type (422)', 422)


def full(_pod: Json) -> Json:
    raise ServerRefusal("pods is forbidden: exceeded quota (403)", 403)


def there_already(_pod: Json) -> Json:
    raise ServerRefusal('pods "x" already exists (409)', 409)


def volumes_of(pod: Json) -> list[Json]:
    volumes: list[Json] = pod["spec"]["volumes"]
    return volumes


def pod(**source: Any) -> Json:
    resource = parsed(**({"model": {"source": source}} if source else {}))
    return render_pod(resource, PodIdentity(0, 0, 0, True, "", 0), Settings())


def checks(server: Server) -> ImageVolumes:
    return ImageVolumes(cast(ApiServer, server))


async def test_support_for_image_volumes_is_checked_once() -> None:
    server = Server(recent)
    volumes = checks(server)
    for _ in range(3):
        volumes.look_again()
        await volumes.check(pod(**IMAGE))
    assert server.tried == 1


async def test_a_pod_without_image_volumes_needs_no_check() -> None:
    server = Server(before_1_31)
    await checks(server).check(pod())
    assert server.tried == 0


@pytest.mark.parametrize("old", [before_1_31, without_the_gate])
async def test_missing_support_is_reported_with_the_remedy_and_checked_once_per_round(
    old: Callable[[Json], Json],
) -> None:
    server = Server(old)
    volumes = checks(server)
    for _ in range(3):
        with pytest.raises(ActionRefused, match=r"image registry/m:1: this API server has no volumes.*upgrade.*or put"):
            await volumes.check(pod(**IMAGE))
    assert server.tried == 1


async def test_an_upgrade_of_the_api_server_takes_effect_in_the_next_round() -> None:
    server = Server(before_1_31)
    volumes = checks(server)
    with pytest.raises(ActionRefused):
        await volumes.check(pod(**IMAGE))
    server.answer = recent
    volumes.look_again()
    await volumes.check(pod(**IMAGE))


async def test_other_errors_of_the_dry_run_are_reported_unchanged() -> None:
    with pytest.raises(ServerRefusal, match="exceeded quota"):
        await checks(Server(full)).check(pod(**IMAGE))


async def test_a_conflict_with_an_existing_pod_does_not_count_as_support() -> None:
    server = Server(there_already)
    volumes = checks(server)
    await volumes.check(pod(**IMAGE))
    server.answer = before_1_31
    with pytest.raises(ActionRefused):
        await volumes.check(pod(**IMAGE))
