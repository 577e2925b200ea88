"""A cluster that runs pods, and its images."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from chart_support.helm import CHART, NAMESPACE, RELEASE, Helm
from cluster_support.cluster import Cluster, wait_until
from cluster_support.errors import CommandFailedError

OPERATOR_VARIABLE = "MEGATRON_TEST_OPERATOR_IMAGE"
RUNTIME_VARIABLE = "MEGATRON_TEST_RUNTIME_IMAGE"
"""Images that a given cluster can pull; the runtime's is built with manifests/samples/smollm2.Dockerfile."""

OPERATOR_SELECTOR = "app.kubernetes.io/name=megatron-operator"
"""Label selector of the operator's pods."""


@dataclass(frozen=True)
class Images:
    """``runtime`` contains SmolLM2."""

    operator: str
    runtime: str


class Stage:
    """The chart on a cluster. ``install`` creates its namespace, ``remove`` deletes it."""

    def __init__(self, cluster: Cluster, images: Images, helm_program: Path, folder: Path) -> None:
        self.cluster = cluster
        self.images = images
        self.helm = Helm(helm_program, folder / "helm", cluster.kubeconfig)

    def install(self) -> None:
        """Returns when the operator's Deployment is available. Raises CommandFailedError."""
        self._helm("install", "--create-namespace", "--wait", "--timeout=110s")

    def upgrade(self, *flags: str) -> None:
        """Returns when the operator's Deployment is available. Raises CommandFailedError."""
        self._helm("upgrade", "--wait", "--timeout=110s", *flags)

    def test(self) -> str:
        """``helm test``; raises CommandFailedError when it fails."""
        return self.helm("test", RELEASE, "--namespace", NAMESPACE, "--timeout=100s")

    def uninstall(self) -> None:
        self.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait")

    def remove(self) -> None:
        """Removes the release, its CRD with all resources, and its namespace."""
        if self.cluster.exists("crd", "megatroninferences.inference.megatron.dev"):
            self.cluster.kubectl("delete", "mi", "--all", "--all-namespaces", "--timeout=100s", timeout=110)
        self.uninstall()
        self.cluster.kubectl("delete", "crd", "megatroninferences.inference.megatron.dev", "--ignore-not-found")
        self.cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=100s", timeout=110)

    def operator_pods(self) -> list[str]:
        """The names of the operator's pods, including terminating ones."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={quote(OPERATOR_SELECTOR)}"
        return [pod["metadata"]["name"] for pod in self.cluster.request("GET", path)["items"]]

    def run_in_pod(self, namespace: str, script: str, *words: str, seconds: float = 100) -> str:
        """Runs a Python script in a pod with the operator's image; returns its output."""
        command = ["python3", "-c", script, *words]
        flags = [f"--image={self.images.operator}", "--restart=Never", "--image-pull-policy=IfNotPresent"]
        self.cluster.kubectl("-n", namespace, "run", "asker", *flags, "--command", "--", *command)
        try:
            wait_until(
                lambda: self._phase(namespace) in ("Succeeded", "Failed"),
                "the end of the client pod",
                seconds,
                every=0.5,
            )
            said = self.cluster.kubectl("-n", namespace, "logs", "asker")
            if self._phase(namespace) == "Failed":
                raise CommandFailedError(said)
            return said
        finally:
            self.cluster.kubectl("-n", namespace, "delete", "pod", "asker", "--grace-period=0", "--force")

    def _phase(self, namespace: str) -> str:
        return str(self.cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods/asker")["status"].get("phase"))

    def _helm(self, verb: str, *flags: str) -> None:
        repository, _, tag = self.images.operator.rpartition(":")
        values = {"image.repository": repository, "image.tag": tag, "runtime.image": self.images.runtime}
        chosen = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        self.helm(verb, RELEASE, CHART, "--namespace", NAMESPACE, *chosen, *flags)
