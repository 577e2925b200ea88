"""The certificates and kubeconfigs of one control plane, made with the openssl command.

Folder: `ca`, `apiserver`, one pair per USERS (`.crt`, `.key`), `service-account.key` and `.pub`; `<user>.kubeconfig`.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_support.errors import CommandFailedError, NoKubernetesError

USERS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
}
APISERVER_NAMES = (
    "IP:127.0.0.1",
    "DNS:localhost",
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default.svc.cluster.local",
)
DAYS = "30"


@dataclass(frozen=True)
class Pki:
    folder: Path

    @classmethod
    def make(cls, folder: Path, server: str) -> "Pki":
        """Fills the folder for an API server at the URL `server`. Raises ClusterSupportError."""
        if shutil.which("openssl") is None:
            raise NoKubernetesError("the control plane's certificates need the openssl command: install openssl")
        folder.mkdir(parents=True, mode=0o700)
        pki = cls(folder)
        pki._make_authority()
        pki._make_certificate("apiserver", "/CN=kube-apiserver", "serverAuth", APISERVER_NAMES)
        for user, subject in USERS.items():
            pki._make_certificate(user, subject, "clientAuth")
            pki._write_kubeconfig(user, server)
        pki._make_service_account_key()
        return pki

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def kubeconfig(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    @property
    def service_account_public_key(self) -> Path:
        return self.folder / "service-account.pub"

    def _make_authority(self) -> None:
        self._make_key("ca")
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
        words = ["-x509", "-key", "ca.key", "-subj", "/CN=megatron-tests", "-days", DAYS, "-out", "ca.crt"]
        self._openssl("req", *words, *(word for extension in extensions for word in ("-addext", extension)))

    def _make_certificate(self, name: str, subject: str, usage: str, names: tuple[str, ...] = ()) -> None:
        extensions = [
            "basicConstraints=CA:FALSE",
            "keyUsage=digitalSignature,keyEncipherment",
            f"extendedKeyUsage={usage}",
        ]
        if names:
            extensions.append(f"subjectAltName={','.join(names)}")
        (self.folder / f"{name}.ext").write_text("\n".join(extensions) + "\n")
        self._make_key(name)
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
        authority = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS]
        files = ["-in", f"{name}.csr", "-extfile", f"{name}.ext", "-out", f"{name}.crt"]
        self._openssl("x509", "-req", *authority, *files)

    def _make_key(self, name: str) -> None:
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")

    def _make_service_account_key(self) -> None:
        self._openssl("genrsa", "-out", "service-account.key", "2048")
        self._openssl("rsa", "-in", "service-account.key", "-pubout", "-out", "service-account.pub")

    def _write_kubeconfig(self, user: str, server: str) -> None:
        cluster = {"server": server, "certificate-authority": str(self.certificate("ca"))}
        credentials = {"client-certificate": str(self.certificate(user)), "client-key": str(self.key(user))}
        write_kubeconfig(self.kubeconfig(user), user, cluster, credentials)

    def _openssl(self, *words: str) -> None:
        command = ["openssl", *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CommandFailedError(f"exit status {done.returncode} from: {' '.join(command)}\n{done.stderr}")


def write_kubeconfig(path: Path, user: str, cluster: dict[str, Any], credentials: dict[str, Any]) -> None:
    """Writes it as JSON, which is YAML too."""
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
