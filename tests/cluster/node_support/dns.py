"""A minimal cluster DNS for the tests: addresses of Services, and of pods with a host name in one.

Usage: `dns.py KUBECONFIG ADDRESS`. Answers UDP on port 53 with data from the API server, without a cache: names end in
`NAMESPACE.svc.cluster.local`. Other names, and types other than A, have no answer. Uses only the standard library.
"""

import json
import socket
import ssl
import struct
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

DOMAIN = ["svc", "cluster", "local"]
TYPE_A = 1
SECONDS_TO_LIVE = 1
NO_ERROR, NO_SUCH_NAME = 0, 3
ANSWER, AUTHORITATIVE = 0x8000, 0x0400


class Api:
    """GET requests with the certificate of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server = cluster["server"]
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._context.load_cert_chain(user["client-certificate"], user["client-key"])

    def get(self, namespace: str, kind: str, name: str) -> dict[str, Any] | None:
        """The object, or None if it does not exist; OSError if the API server does not answer."""
        url = f"{self._server}/api/v1/namespaces/{namespace}/{kind}/{name}"
        try:
            with urllib.request.urlopen(url, context=self._context, timeout=3) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            if error.code in (400, 404):
                return None
            raise


def addresses(api: Api, labels: list[str]) -> list[str]:
    """The addresses of a name, given by its labels."""
    if labels[-3:] != DOMAIN or len(labels) not in (5, 6):
        return []
    service, namespace = labels[-5], labels[-4]
    host = labels[0] if len(labels) == 6 else None
    found = api.get(namespace, "services", service)
    if found is None:
        return []
    address = found["spec"].get("clusterIP", "None")
    if host is None and address != "None":
        return [address]
    unready_too = found["spec"].get("publishNotReadyAddresses", False)
    endpoints = api.get(namespace, "endpoints", service) or {}
    return [each["ip"] for each in _targets(endpoints, unready_too) if host is None or each.get("hostname") == host]


def _targets(endpoints: dict[str, Any], unready_too: bool) -> list[dict[str, Any]]:
    kinds = ("addresses", "notReadyAddresses") if unready_too else ("addresses",)
    return [each for subset in endpoints.get("subsets") or [] for kind in kinds for each in subset.get(kind) or []]


def question(query: bytes) -> tuple[list[str], int, int]:
    """The labels of the name, the requested type, and the end of the question."""
    at, labels = 12, []
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    (kind,) = struct.unpack_from(">H", query, at + 1)
    return labels, kind, at + 5


def reply(query: bytes, found: list[str], kind: int, end: int) -> bytes:
    (flags,) = struct.unpack_from(">H", query, 2)
    answers = found if kind == TYPE_A else []
    code = NO_ERROR if found else NO_SUCH_NAME
    header = struct.pack(">HHHHH", ANSWER | AUTHORITATIVE | (flags & 0x0100) | code, 1, len(answers), 0, 0)
    records = [
        struct.pack(">HHHIH", 0xC00C, TYPE_A, 1, SECONDS_TO_LIVE, 4) + socket.inet_aton(address) for address in answers
    ]
    return query[:2] + header + query[12:end] + b"".join(records)


def main(kubeconfig: Path, address: str) -> None:
    api = Api(kubeconfig)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))

    def answer(query: bytes, asker: tuple[str, int]) -> None:
        labels, kind, end = question(query)
        # The API server does not answer: no reply, so that the client retries.
        server.sendto(reply(query, addresses(api, labels), kind, end), asker)

    while True:
        query, asker = server.recvfrom(1500)
        threading.Thread(target=answer, args=(query, asker), daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
