"""A release of the chart on a control plane, and the operator of its Deployment."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from chart_support.helm import CHART, NAMESPACE, REGISTRY, RELEASE, Helm, Object
from cluster_support.cluster import Cluster, wait_until
from operator_support.operator_process import OperatorProcess
from suite_support import yaml_documents

from megatron_operator.api.crd import crd

NAME = f"{RELEASE}-megatron-inference"
TEST_POD = f"{NAME}-test"
SERVICE_URL = f"http://{NAME}-metrics.{NAMESPACE}.svc:8080"


class Release:
    """``install``, ``upgrade`` and ``uninstall`` are Helm's; the other methods simulate a node."""

    def __init__(self, helm: Helm, cluster: Cluster, folder: Path) -> None:
        self.helm = helm
        self.cluster = cluster
        self._folder = folder

    def install(self, *flags: str, chart: Path = CHART) -> str:
        """Returns when the kind of the CRD is served."""
        output = self.helm("install", RELEASE, chart, "--namespace", NAMESPACE, REGISTRY, *flags)
        self.cluster.until_served(crd())
        return output

    def upgrade(self, *flags: str, chart: Path = CHART) -> str:
        return self.helm("upgrade", RELEASE, chart, "--namespace", NAMESPACE, REGISTRY, *flags)

    def uninstall(self) -> str:
        return self.helm("uninstall", RELEASE, "--namespace", NAMESPACE)

    def deployment(self) -> Object:
        return self.cluster.get("deployment", NAME, "-n", NAMESPACE)

    @contextmanager
    def operator(self) -> Iterator[OperatorProcess]:
        """Runs the command of the Deployment with the permissions of the release's ServiceAccount."""
        pod = self.deployment()["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["megatron-operator", "run"]
        namespaces = [word.removeprefix("--namespace=") for word in container["args"] if "--namespace=" in word]
        assert [each["name"] for each in container["env"] if "valueFrom" in each] == ["MEGATRON_OPERATOR_NAMESPACE"]
        values = {each["name"]: each.get("value", NAMESPACE) for each in container["env"]}
        reference = "$(MEGATRON_OPERATOR_NAMESPACE)"  # the kubelet substitutes the value
        settings = {name: value.replace(reference, NAMESPACE) for name, value in values.items()}
        kubeconfig = self.cluster.kubeconfig_for(pod["serviceAccountName"], NAMESPACE)
        log = self._folder / "operator.log"
        process = OperatorProcess(kubeconfig, log, namespaces=namespaces, settings=settings)
        try:
            process.start()
            yield process
        finally:
            process.stop()

    def test(self, url: str, helm_test: Callable[[], str] | None = None) -> str:
        """``helm test``, or another command that does it, with the Service at ``url``.

        Raises CommandFailedError, or the error of the command, when the test fails.
        """
        node = threading.Thread(target=self._run_test_pod, args=(url,))
        node.start()
        try:
            return helm_test() if helm_test else self.helm("test", RELEASE, "--namespace", NAMESPACE, "--timeout=60s")
        finally:
            node.join()

    def _run_test_pod(self, url: str) -> None:
        """Simulates a kubelet: runs the pod's command, then writes its end into the status."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{TEST_POD}"
        wait_until(lambda: self.cluster.read(path) is not None, f"pod {TEST_POD}", timeout=30)
        (container,) = self.cluster.get("pod", TEST_POD, "-n", NAMESPACE)["spec"]["containers"]
        program, *words = [word.replace(SERVICE_URL, url) for word in container["command"]]
        assert program == "python3"
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=30, check=False)
        phase = "Failed" if done.returncode else "Succeeded"
        patch = f'{{"status": {{"phase": "{phase}"}}}}'
        how = ("--subresource=status", "--type=merge", "-p", patch)
        self.cluster.kubectl("patch", "pod", TEST_POD, "-n", NAMESPACE, *how)


def older_chart(helm: Helm, folder: Path, version: str, field: str) -> Path:
    """A package of the chart with this version, and without this field of ``spec.routing``."""
    copy = folder / "chart"
    subprocess.run(["cp", "-r", CHART, copy], check=True)
    definition = copy / "files" / "crd.yaml"
    older = yaml_documents.load(definition.read_text())
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["routing"]["properties"][field], spec["properties"]["routing"]["default"][field]
    definition.write_text(yaml.safe_dump(older))
    helm("package", copy, "--version", version, "--app-version", version, "--destination", folder)
    return folder / f"{CHART.name}-{version}.tgz"
