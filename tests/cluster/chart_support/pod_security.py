"""The level `restricted` of Kubernetes' Pod Security Standards, as of v1.37, for Linux pods.

Implemented from the published table of controls, because API servers before 1.23 do not have the levels.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = ("RuntimeDefault", "Localhost")
SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
APPARMOR = ("RuntimeDefault", "Localhost")
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
}
CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
HOOKS = (
    ("livenessProbe",),
    ("readinessProbe",),
    ("startupProbe",),
    ("lifecycle", "postStart"),
    ("lifecycle", "preStop"),
)


def violations(pod: Json) -> list[str]:
    """The paths of the fields that `restricted` forbids; empty for an admitted pod."""
    spec: Json = pod["spec"]
    own: Json = spec.get("securityContext") or {}
    found = [*_of_the_host(spec), *_of_the_pod(own), *_of_volumes(spec)]
    for kind in CONTAINERS:
        for container in spec.get(kind) or []:
            found += (f"{kind}[{container['name']}].{path}" for path in _of_container(container, own))
    annotations: Json = pod["metadata"].get("annotations") or {}
    found += [key for key in annotations if key.startswith("container.apparmor.security.beta.kubernetes.io/")]
    return found


def _of_the_host(spec: Json) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field


def _of_the_pod(own: Json) -> Iterator[str]:
    yield from (f"securityContext.{path}" for path in _of_either(own))
    for sysctl in own.get("sysctls") or []:
        if sysctl["name"] not in SYSCTLS:
            yield f"securityContext.sysctls[{sysctl['name']}]"


def _of_volumes(spec: Json) -> Iterator[str]:
    for volume in spec.get("volumes") or []:
        for kind in volume.keys() - {"name"} - VOLUMES:
            yield f"volumes[{volume['name']}].{kind}"


def _of_either(context: Json) -> Iterator[str]:
    """Violations in the security context of a pod or container."""
    if context.get("runAsUser") == 0:
        yield "runAsUser"
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield "windowsOptions.hostProcess"
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"
    for field, allowed in (("seccompProfile", SECCOMP), ("appArmorProfile", APPARMOR)):
        if field in context and context[field].get("type") not in allowed:
            yield f"{field}.type"


def _of_container(container: Json, pod: Json) -> Iterator[str]:
    own: Json = container.get("securityContext") or {}
    yield from _of_either(own)
    if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield "runAsNonRoot"
    if "seccompProfile" not in own and "seccompProfile" not in pod:
        yield "seccompProfile"
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or []):
        yield "capabilities.drop"
    if set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    yield from _of_ports_and_hooks(container)


def _of_ports_and_hooks(container: Json) -> Iterator[str]:
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield "ports.hostPort"
    for path in HOOKS:
        hook: Any = container
        for step in path:
            hook = (hook or {}).get(step) or {}
        if any((hook.get(handler) or {}).get("host") for handler in ("httpGet", "tcpSocket")):
            yield f"{'.'.join(path)}.host"
