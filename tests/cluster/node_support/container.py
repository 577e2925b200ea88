"""Runs a command in a built image as pods of the operator do: as the image's user, without privileges, with a read-only
root and an empty /tmp, and without a network but the loopback device."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node_support.images import Builder, Image

RUN = """
set -e
container=$("$@" from --pull-never --signature-policy="$POLICY" "$IMAGE")
trap '"$@" rm "$container" > /dev/null' EXIT
mount --bind "$("$@" mount "$container")" "$BUNDLE/rootfs"
"$RUNC" --root "$BUNDLE/state" run --bundle "$BUNDLE" "try-$$"
"""


def run_in_image(builder: Builder, image: Image, command: Sequence[str], mounts: Mapping[str, Path], log: Path) -> None:
    """Runs a command to its end, with its output in a log. Raises ClusterSupportError if it fails.

    ``mounts`` are files and folders that the container has read-only, by their paths there.
    """
    settings = json.loads(builder.asked("inspect", "--type=image", image.name))["OCIv1"]["config"]
    with tempfile.TemporaryDirectory(dir=builder.workspace) as folder:
        bundle = Path(folder)
        (bundle / "rootfs").mkdir()
        (bundle / "config.json").write_text(json.dumps(_specification(settings, command, mounts)))
        variables = {
            "BUNDLE": bundle,
            "IMAGE": image.name,
            "POLICY": builder.tools.signature_policy,
            "RUNC": builder.tools.program("runc"),
        }
        environment = [f"{name}={value}" for name, value in variables.items()]
        builder.run_privately(["env", *environment, "sh", "-c", RUN, "sh", *builder.command], log)


def _specification(settings: dict[str, Any], command: Sequence[str], mounts: Mapping[str, Path]) -> dict[str, Any]:
    """The configuration for runc, from the settings of the image."""
    user, _, group = settings["User"].partition(":")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": int(user), "gid": int(group)},
            "args": list(command),
            "env": settings["Env"],
            "cwd": settings.get("WorkingDir") or "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]},
            *(
                {"destination": path, "type": "bind", "source": str(source), "options": ["rbind", "ro"]}
                for path, source in mounts.items()
            ),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }
