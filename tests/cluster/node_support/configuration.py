"""Configuration of the programs of a node. All addresses exist only in its own network."""

from pathlib import Path
from typing import Any

from cluster_support.pki import Pki
from node_support.tools import NodeTools

NODE = "node"
NODE_ADDRESS = "10.200.0.1"
DNS_ADDRESS = "10.96.0.10"
API_SERVICE_ADDRESS = "10.96.0.1"
PODS = "10.244.0.0/16"
PAUSE_IMAGE = "localhost/pause:1"

USERS = {
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "kube-proxy": ("system:kube-proxy", None),
    "apiserver-kubelet": ("apiserver-kubelet", "system:masters"),
    "dns": ("dns", "system:masters"),
}
"""Users in addition to those of a control plane."""

_CONTAINERD = """
version = 2
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
restrict_oom_score_adj = true  # lowering it requires CAP_SYS_RESOURCE
sandbox_image = "{pause}"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni}"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"""
_NETWORK = """{{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [
    {{
      "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
      "ipam": {{
        "type": "host-local", "ranges": [[{{"subnet": "{pods}"}}]], "routes": [{{"dst": "0.0.0.0/0"}}],
        "dataDir": "{folder}/cni-leases"
      }}
    }},
    {{"type": "portmap", "capabilities": {{"portMappings": true}}}}
  ]
}}"""


def socket(folder: Path) -> Path:
    """The socket of containerd."""
    return folder / "containerd" / "socket"


def containerd(folder: Path, tools: NodeTools) -> str:
    """The configuration of containerd; also writes that of the pod network."""
    (folder / "cni").mkdir(exist_ok=True)
    (folder / "containerd").mkdir(exist_ok=True)
    (folder / "cni/pods.conflist").write_text(_NETWORK.format(pods=PODS, folder=folder))
    return _CONTAINERD.format(
        folder=folder, socket=socket(folder), pause=PAUSE_IMAGE, cni=tools.cni, runc=tools.program("runc")
    )


def kubelet(folder: Path, pki: Pki) -> dict[str, Any]:
    """Short intervals, so that tests need not wait; no evictions while any disk space is left."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.certificate("ca"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki.certificate("kubelet")),
        "tlsPrivateKeyFile": str(pki.key("kubelet")),
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "4s",
        "syncFrequency": "10s",
        "fileCheckFrequency": "5s",
        "healthzBindAddress": "127.0.0.1",
    }


def kube_proxy(pki: Pki) -> dict[str, Any]:
    """Does not change the size of the kernel's connection table."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "bindAddress": "0.0.0.0",
        "clientConnection": {"kubeconfig": str(pki.kubeconfig("kube-proxy"))},
        "hostnameOverride": NODE,
        "clusterCIDR": PODS,
        "mode": "iptables",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }
