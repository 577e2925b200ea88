"""Access to a cluster of the tests, or to a given one."""

import functools
import http
import json
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_support.binaries import Source
from cluster_support.errors import CommandFailedError, NotReadyError, RequestRefusedError
from cluster_support.pki import write_kubeconfig
from kubernetes import client, config


def wait_until(is_so: Callable[[], bool], what: str, timeout: float = 60.0, every: float = 0.1) -> None:
    """Polls until the condition holds. Raises NotReadyError with ``what``."""
    deadline = time.monotonic() + timeout
    while not is_so():
        if time.monotonic() > deadline:
            raise NotReadyError(f"timeout after {timeout:.0f} s: waited for {what}")
        time.sleep(every)


DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
RULED_DEFINITION: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "probes.tests.megatron.dev"},
    "spec": {
        "group": "tests.megatron.dev",
        "scope": "Namespaced",
        "names": {"kind": "Probe", "plural": "probes"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-validations": [{"rule": "self.metadata.name != 'x'"}],
                    }
                },
            }
        ],
    },
}
POD_WITH_IMAGE_VOLUME: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "probe", "namespace": "default"},
    "spec": {
        "automountServiceAccountToken": False,
        "containers": [{"name": "probe", "image": "probe"}],
        "volumes": [{"name": "probe", "image": {"reference": "probe"}}],
    },
}


class Cluster:
    """A running cluster, with administrator access.

    `folder` is for this object's files; `version` is the API server's, such as v1.20.2.
    """

    def __init__(self, kubeconfig: Path, kubectl: Path, folder: Path, source: Source) -> None:
        self.kubeconfig = kubeconfig
        self.folder = folder
        self.description = str(source)
        self.version = source.version
        self.kubectl_path = kubectl

    @property
    def has_controllers(self) -> bool:
        """Whether controllers collect garbage and create the default ServiceAccounts."""
        return True

    @property
    def custom_resources_kubeconfig(self) -> Path:
        """Administrator access to the server for custom resources without its proxy, if it is a server of its own."""
        return self.kubeconfig

    @functools.cached_property
    def knows_cel(self) -> bool:
        """Whether the API server keeps the CEL rules of CRDs, detected by a dry run."""
        spec = self.request("POST", f"{DEFINITIONS}?dryRun=All", RULED_DEFINITION)["spec"]
        return "x-kubernetes-validations" in spec["versions"][0]["schema"]["openAPIV3Schema"]

    @functools.cached_property
    def knows_image_volumes(self) -> bool:
        """Whether the API server keeps image volumes in pods, detected by a dry run."""
        stored = self.request("POST", "/api/v1/namespaces/default/pods?dryRun=All", POD_WITH_IMAGE_VOLUME)
        (volume,) = stored["spec"]["volumes"]
        return "image" in volume

    def kubectl(self, *args: str, input: str | None = None, kubeconfig: Path | None = None, timeout: float = 60) -> str:
        """Runs kubectl; returns its output. Raises CommandFailedError with its error.

        The default kubeconfig is the administrator's.
        """
        flags = [f"--kubeconfig={kubeconfig or self.kubeconfig}", f"--cache-dir={self.folder / 'kubectl-cache'}"]
        command = [str(self.kubectl_path), *flags, *args]
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode != 0:
            raise CommandFailedError(f"kubectl {' '.join(args)}: exit status {done.returncode}\n{done.stderr.strip()}")
        return done.stdout

    def get(self, *args: str) -> dict[str, Any]:
        """`kubectl get`, parsed."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "-o", "json", *args))
        return found

    def read(self, path: str) -> dict[str, Any] | None:
        """The response to a GET of a URL path; None for 404."""
        try:
            return self.request("GET", path)
        except RequestRefusedError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return None
            raise

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """The parsed response. Raises RequestRefusedError.

        Requests share connections, which is faster than a kubectl process per request.
        """
        headers = {"Accept": "application/json", "Content-Type": content_type}
        words = self._api.param_serialize(method, path, header_params=headers, body=body, auth_settings=["BearerToken"])
        response = self._api.call_api(*words, _request_timeout=20)
        text = response.read().decode()
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            raise RequestRefusedError(f"{method} {path}: {response.status} {text[:1000]}", response.status)
        answer: dict[str, Any] = json.loads(text)
        return answer

    @functools.cached_property
    def _api(self) -> client.ApiClient:
        return config.new_client_from_config(str(self.kubeconfig), persist_config=False)

    def apply(self, namespace: str, *manifests: dict[str, Any], manager: str = "tests") -> None:
        """Server-side apply."""
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        words = ["apply", "--server-side", f"--field-manager={manager}", "-f", "-"]
        self.kubectl("-n", namespace, *words, input=json.dumps(listed))

    def define(self, *definitions: dict[str, Any]) -> None:
        """Applies CRDs, and returns when their kinds are served."""
        listed = {"apiVersion": "v1", "kind": "List", "items": definitions}
        # An older core drops CEL rules, or leaves them to a newer server, but kubectl validates against the core's
        # schema.
        self.kubectl("apply", "--validate=false", "-f", "-", input=json.dumps(listed))
        for definition in definitions:
            self.until_served(definition)

    def until_served(self, definition: dict[str, Any]) -> None:
        """Returns when the kind of an applied CRD is served."""
        name = definition["metadata"]["name"]
        wait_until(lambda: self._is_established(name), f"{name} to be established", timeout=30)
        wait_until(lambda: self._is_served(definition), f"{name} to be in discovery", timeout=30)
        wait_until(lambda: self._accepts_objects(definition), f"objects of {name} to be accepted", timeout=30)

    def _is_established(self, name: str) -> bool:
        """A new CRD has no conditions yet."""
        found = self.read(f"{DEFINITIONS}/{name}") or {}
        conditions = found.get("status", {}).get("conditions") or []
        return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)

    def _is_served(self, definition: dict[str, Any]) -> bool:
        """An aggregator serves a kind some time after it is established, and lists one of a core group later still."""
        spec = definition["spec"]
        served = [each["name"] for each in spec["versions"] if each["served"]]
        services = "/apis/apiregistration.k8s.io/v1/apiservices"
        found = [self.read(f"{services}/{version}.{spec['group']}") or {} for version in served]
        conditions = [each.get("status", {}).get("conditions") or [] for each in found]
        if not all(("Available", "True") in [(each["type"], each["status"]) for each in part] for part in conditions):
            return False
        listed = [(self.read(f"/apis/{spec['group']}/{version}") or {}).get("resources") or [] for version in served]
        return all(spec["names"]["plural"] in [each["name"] for each in part] for part in listed)

    def _accepts_objects(self, definition: dict[str, Any]) -> bool:
        """Whether a create gets to the server for custom resources: an aggregator serves discovery and reads itself,
        then neither for a moment, until it proxies a new group version, seconds later if there is much load."""
        spec = definition["spec"]
        scope = "" if spec["scope"] == "Cluster" else "namespaces/default/"
        return all(self._accepts_object(spec, each["name"], scope) for each in spec["versions"] if each["served"])

    def _accepts_object(self, spec: dict[str, Any], version: str, scope: str) -> bool:
        group_version = f"{spec['group']}/{version}"
        probe = {"apiVersion": group_version, "kind": spec["names"]["kind"], "metadata": {"name": "probe"}}
        try:
            self.request("POST", f"/apis/{group_version}/{scope}{spec['names']['plural']}?dryRun=All", probe)
        except RequestRefusedError as error:
            return error.status in (http.HTTPStatus.UNPROCESSABLE_ENTITY, http.HTTPStatus.BAD_REQUEST)
        return True

    def exists(self, *args: str) -> bool:
        """Whether `kubectl get` finds something."""
        return self.kubectl("get", "--ignore-not-found", "-o", "name", *args) != ""

    def make_namespace(self) -> str:
        """A new namespace that accepts pods; the caller deletes it."""
        name = f"test-{uuid.uuid4().hex[:10]}"
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.request("POST", "/api/v1/namespaces", namespace)
        wait_until(lambda: self._accepts_pods(name), f"namespace {name} to accept pods", every=0.05)
        return name

    def delete_namespace(self, name: str) -> None:
        """Starts the deletion; the content is deleted in the background."""
        if self.read(f"/api/v1/namespaces/{name}") is not None:
            self.request("DELETE", f"/api/v1/namespaces/{name}")

    def _accepts_pods(self, namespace: str) -> bool:
        """Admission refuses pods until the namespace's ServiceAccount exists, up to 1.20 with its token."""
        spec = {"containers": [{"name": "probe", "image": "probe"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
        try:
            self.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
        except RequestRefusedError:
            return False
        return True

    def kubeconfig_for(self, service_account: str, namespace: str) -> Path:
        """A kubeconfig with a token (1 h) of an existing ServiceAccount, to test its permissions."""
        token = self.kubectl("-n", namespace, "create", "token", service_account, "--duration=1h").strip()
        config = json.loads(self.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        path = self.folder / f"{namespace}.{service_account}.kubeconfig"
        write_kubeconfig(path, service_account, config["clusters"][0]["cluster"], {"token": token})
        return path
