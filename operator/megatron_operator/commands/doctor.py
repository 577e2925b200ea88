"""``doctor``: checks a cluster for missing prerequisites and shows how to fix them."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from rich.console import Console
from rich.text import Text

from megatron_operator import names
from megatron_operator.api.crd import crd
from megatron_operator.api.v1alpha1 import Device, GpuAllocation
from megatron_operator.api.v1alpha1.serving import ApiKeysSecret
from megatron_operator.commands import activator_diagnosis, diagnosis
from megatron_operator.commands.console import say
from megatron_operator.commands.diagnosis import Finding, Level
from megatron_operator.commands.operator_rights import Right, needed, needed_by_activator
from megatron_operator.kubernetes.api_server import Json, ServerError, ServerRefusal
from megatron_operator.kubernetes.user_cluster import UserCluster, core_path, resources_path
from megatron_operator.render.network_policy import OPERATOR

LEVEL_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "bold red", Level.UNKNOWN: "dim"}
REVIEWS_AT_A_TIME = 8
API_KEYS = str(ApiKeysSecret.model_fields["key"].default)
"""Default for old API servers that do not fill it in."""


@dataclass(frozen=True)
class Doctor:
    """Runs all checks for one namespace. Raises AdapterError when the cluster does not answer."""

    cluster: UserCluster
    namespace: str
    console: Console

    async def run(self) -> int:
        """The exit code: 1 when a prerequisite is missing."""
        release = await self.cluster.read("/version")
        checks = {
            "definition": self._definition(),
            "rules": self._rules(),
            "operator": self._operators(),
            "activator": self._activators(),
            "models": self._for_models(),
            "Secrets": self._secrets(),
            "namespace": self._namespace(),
            "StorageClass": self._storage(),
            "Kueue": self._kueue(),
        }
        found = await asyncio.gather(*(_allowed(subject, check) for subject, check in checks.items()))
        findings = [diagnosis.api_server(release), *(each for part in found for each in part)]
        findings.append(diagnosis.NETWORK_POLICIES)
        say(self.console, f"{self.cluster.server} (context {self.cluster.context}), namespace {self.namespace}")
        for finding in findings:
            say(self.console, _line(finding))
            if finding.fix:
                say(self.console, f"{'':8} {'':15} {finding.fix}")
        missing = sum(finding.level is Level.MISSING for finding in findings)
        unseen = sum(finding.level is Level.UNKNOWN for finding in findings) - 1
        words = f"{missing} missing" if missing else "no prerequisite is missing"
        say(self.console, f"{words}; {unseen} could not be checked" if unseen else words)
        return 1 if missing else 0

    async def _definition(self) -> Sequence[Finding]:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd()['metadata']['name']}"
        return [diagnosis.definition(await self._maybe(path))]

    async def _rules(self) -> Sequence[Finding]:
        """Whether a dry run rejects a resource that breaks one rule. The server's version does not show it."""
        try:
            await self.cluster.post(resources_path(self.namespace), diagnosis.RULE_BREAKER, {"dryRun": "All"})
        except (ServerError, ServerRefusal) as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return []  # The kind or the namespace is missing, which another check reports.
            if diagnosis.BROKEN_RULE not in str(error):
                raise
            return [diagnosis.rules(enforced=True)]
        return [diagnosis.rules(enforced=False)]

    async def _operators(self) -> Sequence[Finding]:
        deployments = await self._deployments(OPERATOR)
        findings = list(diagnosis.operators(deployments, self.namespace, version("megatron-inference")))
        for deployment in deployments:
            findings += await _allowed("permissions", self._rights(deployment))
        return findings

    async def _activators(self) -> Sequence[Finding]:
        deployments, resources = await self._deployments(activator_diagnosis.LABELS), await self._resources()
        release = version("megatron-inference")
        findings = list(activator_diagnosis.activators(deployments, resources, self.namespace, release))
        for deployment in deployments:
            findings += await _allowed("permissions", self._activator_rights(deployment, resources))
        return findings

    async def _deployments(self, labels: Mapping[str, str]) -> Sequence[Json]:
        """The Deployments of all namespaces with these labels."""
        selector = ",".join(f"{label}={value}" for label, value in labels.items())
        return (await self.cluster.read("/apis/apps/v1/deployments", {"labelSelector": selector})).get("items") or []

    async def _rights(self, deployment: Json) -> Sequence[Finding]:
        only = diagnosis.watched(deployment)
        if only and self.namespace not in only:
            return []
        user = _account_of(deployment)
        keys = [names.keys_secret(item["metadata"]["name"]) for item in await self._resources()]
        lease = diagnosis.lease_of(deployment)
        denied = await self._denied(user, needed(self.namespace, everywhere=not only, lease=lease, keys=keys))
        return [diagnosis.rights(user, [str(right) for right in denied])]

    async def _activator_rights(self, deployment: Json, resources: Sequence[Json]) -> Sequence[Finding]:
        only = diagnosis.watched(deployment)
        if only and self.namespace not in only:
            return []
        user = _account_of(deployment)
        rights = needed_by_activator(self.namespace, activator_diagnosis.key_secrets(resources))
        return [activator_diagnosis.activator_rights(user, await self._denied(user, rights))]

    async def _denied(self, user: str, rights: Iterable[Right]) -> list[Right]:
        """Those of the rights that the user does not have."""
        slots = asyncio.Semaphore(REVIEWS_AT_A_TIME)

        async def denied(right: Right) -> bool:
            async with slots:
                return not await self._may(user, right)

        asked = list(rights)
        answers = await asyncio.gather(*map(denied, asked))
        return [right for right, is_denied in zip(asked, answers, strict=True) if is_denied]

    async def _may(self, user: str, right: Right) -> bool:
        resource, _, subresource = right.resource.partition("/")
        attributes = {"group": right.group, "resource": resource, "subresource": subresource, "verb": right.verb}
        # Empty strings mean the whole cluster and all objects.
        attributes |= {"namespace": right.namespace, "name": right.name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": attributes, "groups": _groups_of(user)},
        }
        answer = await self.cluster.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool((answer.get("status") or {}).get("allowed"))

    async def _resources(self) -> Sequence[Json]:
        """The resources of the namespace; none when the CRD is missing."""
        return (await self._maybe(resources_path(self.namespace)) or {}).get("items") or []

    async def _for_models(self) -> Sequence[Finding]:
        """Checks of what the models of the namespace use."""
        specs = [item["spec"] for item in await self._resources()]
        on_gpu = [spec.get("pods") or {} for spec in specs if _device(spec) == Device.CUDA]
        on_gpu = [pods for pods in on_gpu if pods.get("gpuAllocation") != GpuAllocation.RESOURCE_CLAIMS]
        asked = [pods.get("gpuResource") or "nvidia.com/gpu" for pods in on_gpu]
        nodes = (await self.cluster.read("/api/v1/nodes")).get("items") or []
        findings = list(diagnosis.gpus(nodes, asked, resources_on_cpu=bool(specs) and not on_gpu))
        templates = ((spec.get("podTemplate") or {}).get("spec") or {} for spec in specs)
        holders = [*templates, *(spec.get("pods") or {} for spec in specs)]
        wanted = [each["runtimeClassName"] for each in holders if each.get("runtimeClassName")]
        present = await self._maybe("/apis/node.k8s.io/v1/runtimeclasses") or {}
        names = [each["metadata"]["name"] for each in present.get("items") or []]
        findings.append(diagnosis.runtime_classes(names, wanted))
        for claim in sorted(set(_claims(specs))):
            path = core_path(self.namespace, "persistentvolumeclaims", claim)
            findings.append(diagnosis.claim(claim, await self._maybe(path)))
        return findings

    async def _secrets(self) -> Sequence[Finding]:
        """Checks of the Secrets that the models of the namespace use. The values are not printed."""
        keys = secret_keys(item["spec"] for item in await self._resources())
        return [
            each
            for name, wanted in keys.items()
            for each in await _allowed(f"Secret {name}", self._secret(name, wanted))
        ]

    async def _secret(self, name: str, keys: Sequence[str]) -> Sequence[Finding]:
        return [diagnosis.secret(name, keys, await self._maybe(core_path(self.namespace, "secrets", name)))]

    async def _namespace(self) -> Sequence[Finding]:
        return [diagnosis.pod_security(self.namespace, await self._maybe(f"/api/v1/namespaces/{self.namespace}"))]

    async def _storage(self) -> Sequence[Finding]:
        classes = await self.cluster.read("/apis/storage.k8s.io/v1/storageclasses")
        return [diagnosis.storage(classes.get("items") or [])]

    async def _kueue(self) -> Sequence[Finding]:
        groups = (await self.cluster.read("/apis")).get("groups") or []
        return [diagnosis.kueue(group["name"] for group in groups)]

    async def _maybe(self, path: str) -> Json | None:
        """None when the object does not exist."""
        try:
            return await self.cluster.read(path)
        except ServerError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return None
            raise


async def _allowed(subject: str, check: Awaitable[Sequence[Finding]]) -> Sequence[Finding]:
    """The result of a check, or an unknown result when reading is forbidden. Other checks continue."""
    try:
        return await check
    except ServerRefusal as refusal:
        words = str(refusal).partition(": ")[2].removesuffix(" (403)")
        return [Finding(Level.UNKNOWN, subject, words, "ask someone with the right to read it")]


def _account_of(deployment: Json) -> str:
    """The user name of the ServiceAccount of the Deployment's pods."""
    account = deployment["spec"]["template"]["spec"].get("serviceAccountName") or "default"
    return f"system:serviceaccount:{deployment['metadata']['namespace']}:{account}"


def _groups_of(user: str) -> list[str]:
    """The groups that the API server assigns to a ServiceAccount."""
    namespace = user.split(":")[2]
    return ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]


def _device(spec: Json) -> str:
    return str((spec.get("pods") or {}).get("device") or Device.CUDA)


def _claims(specs: Sequence[Json]) -> Iterator[str]:
    for spec in specs:
        model: Mapping[str, Json] = spec.get("model") or {}
        source, cache = model.get("source") or {}, model.get("cache") or {}
        if "persistentVolumeClaim" in source:
            yield str(source["persistentVolumeClaim"]["claimName"])
        if "claimName" in cache:
            yield str(cache["claimName"])


def secret_keys(specs: Iterable[Json]) -> dict[str, list[str]]:
    """The keys that are used of each Secret; none for image pull secrets."""
    wanted: dict[str, list[str]] = {}
    for spec in specs:
        hub = ((spec.get("model") or {}).get("source") or {}).get("huggingFace") or {}
        users = (spec.get("frontend") or {}).get("apiKeysSecret")
        for selector in filter(None, (hub.get("tokenSecret"), users)):
            wanted.setdefault(selector["name"], []).append(selector.get("key") or API_KEYS)
        objects = ((spec.get("model") or {}).get("source") or {}).get("objectStorage") or {}
        if "credentialsSecret" in objects:
            wanted.setdefault(objects["credentialsSecret"], [])
        for reference in ((spec.get("podTemplate") or {}).get("spec") or {}).get("imagePullSecrets") or []:
            wanted.setdefault(reference["name"], [])
    return wanted


def _line(finding: Finding) -> Text:
    line = Text(f"{finding.level.value:<8}", style=LEVEL_STYLES[finding.level])
    return line.append(f" {finding.subject:<15} {finding.words}", style="default")
