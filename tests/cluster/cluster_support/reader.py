"""A reader of the docs with a cluster: kubectl, its plugin and Helm, as an administrator."""

import json
from pathlib import Path

from cluster_support.cluster import Cluster
from cluster_support.control_plane import free_ports
from suite_support.doc_shell import DocShell


def reader_of(cluster: Cluster, folder: Path, namespace: str, helm: Path | None = None) -> DocShell:
    """``namespace`` is that of commands that name none."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    config["contexts"][0]["context"]["namespace"] = namespace
    folder.mkdir()
    kubeconfig = folder / "kubeconfig"
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(json.dumps(config))
    return DocShell(
        folder,
        {"kubectl": cluster.kubectl_path, **({"helm": helm} if helm else {})},
        KUBECONFIG=str(kubeconfig),
        KUBECACHEDIR=str(folder / "kubectl-cache"),
        MEGATRON_OPERATOR_METRICS_HOST="127.0.0.1",
        MEGATRON_OPERATOR_METRICS_PORT=str(free_ports(1)[0]),
        **{f"HELM_{kind}_HOME": str(folder / f"helm-{kind.lower()}") for kind in ("CACHE", "CONFIG", "DATA")},
    )
