"""The certificates and kubeconfigs of one control plane.

Folder: `ca`, `apiserver`, `front-proxy`, `service-account` and one pair per user (`.crt`, `.key`); `<user>.kubeconfig`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

User = tuple[str, str | None]
USERS: dict[str, User] = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", None),
    "scheduler": ("system:kube-scheduler", None),
}
"""User names and groups: common names and organizations of the certificates."""
FRONT_PROXY = "front-proxy"
"""User of the API server's aggregator."""
APISERVER_NAMES = (
    "127.0.0.1",
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(frozen=True)
class Pki:
    folder: Path

    @classmethod
    def make(
        cls, folder: Path, server: str, *, others: Mapping[str, User] | None = None, addresses: Sequence[str] = ()
    ) -> "Pki":
        """Creates the files for an API server at the URL `server`.

        `others` are users besides USERS; every certificate is also valid for `addresses`.
        """
        folder.mkdir(parents=True, mode=0o700)
        pki, authority = cls(folder), trustme.CA()
        authority.cert_pem.write_to_path(pki.certificate("ca"))
        pki._keep("apiserver", authority.issue_cert(*APISERVER_NAMES, *addresses, common_name="kube-apiserver"))
        pki._keep(FRONT_PROXY, authority.issue_cert(FRONT_PROXY, common_name=FRONT_PROXY))
        pki._keep("service-account", authority.issue_cert("service-account"))
        for user, (name, group) in {**USERS, **(others or {})}.items():
            # Go refuses a certificate with an empty list of host names.
            issued = authority.issue_cert(user, *addresses, common_name=name, organization_name=group)
            pki._keep(user, issued)
            pki.write_kubeconfig(user, server, pki.kubeconfig(user))
        return pki

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def kubeconfig(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    def write_kubeconfig(self, user: str, server: str, path: Path) -> Path:
        """Writes a kubeconfig of the user for a server with the certificate of the API server; returns the path."""
        cluster = {"server": server, "certificate-authority": str(self.certificate("ca"))}
        credentials = {"client-certificate": str(self.certificate(user)), "client-key": str(self.key(user))}
        write_kubeconfig(path, user, cluster, credentials)
        return path

    def _keep(self, name: str, issued: trustme.LeafCert) -> None:
        issued.cert_chain_pems[0].write_to_path(self.certificate(name))
        self.key(name).touch(mode=0o600)
        issued.private_key_pem.write_to_path(self.key(name))


def write_kubeconfig(path: Path, user: str, cluster: dict[str, Any], credentials: dict[str, Any]) -> None:
    """Writes it as JSON, which is valid YAML."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user}}],
        "current-context": "tests",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))
