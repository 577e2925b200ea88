"""Archives of images without random ids, so that the same image has the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

REVISION_LABEL = "org.opencontainers.image.revision"
RANDOM_FIELDS = ("container", "container_config", "parent")
"""Fields of an image's configuration with ids of containers and images on the machine of the build. The comments of the
history have them too."""


def normalize_archive(path: Path, date: int, revision: str) -> str:
    """Replace an archive of one image for `docker load` by one whose bytes depend only on the image and the arguments.

    All times in the configuration are ``date``, in seconds since 1970, and its label of the commit is ``revision``: the
    cache of buildah ignores the values of build arguments. The layers are kept.

    Returns:
        The digest of the image's configuration, its id.
    """
    replaced = path.with_name(f"{path.name}.tmp")
    with tarfile.open(path) as archive, tarfile.open(replaced, "w", format=tarfile.USTAR_FORMAT) as normalized:
        (manifest,) = _json(archive, "manifest.json")
        config = json.dumps(_normalized(_json(archive, manifest["Config"]), date, revision), sort_keys=True).encode()
        digest = hashlib.sha256(config).hexdigest()
        for layer in dict.fromkeys(manifest["Layers"]):
            entry = tarfile.TarInfo(layer)
            entry.size = archive.getmember(layer).size
            normalized.addfile(entry, archive.extractfile(layer))
        named = [{"Config": f"{digest}.json", "RepoTags": manifest["RepoTags"], "Layers": manifest["Layers"]}]
        for name, content in ((f"{digest}.json", config), ("manifest.json", json.dumps(named).encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            normalized.addfile(entry, io.BytesIO(content))
    replaced.replace(path)
    return f"sha256:{digest}"


def _json(archive: tarfile.TarFile, name: str) -> Any:
    file = archive.extractfile(name)
    assert file is not None
    return json.load(file)


def _normalized(config: dict[str, Any], date: int, revision: str) -> dict[str, Any]:
    labels = config["config"]["Labels"] | {REVISION_LABEL: revision}
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(date))
    return _without(config, *RANDOM_FIELDS) | {
        "created": created,
        "config": {**config["config"], "Hostname": "", "Image": "", "Labels": labels},
        "history": [_without(step, "comment") | {"created": created} for step in config.get("history", ())],
    }


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
