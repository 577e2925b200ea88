"""Archives of images: the same bytes for builds that differ in random ids and times."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from suite_support.doc_blocks import ROOT

sys.path.append(str(ROOT / "tools"))

from image_archives import REVISION_LABEL, normalize_archive

DATE = 1_700_000_000
LAYER = b"a layer" * 100
NAME = "localhost/megatron-inference/operator:0.1.0"


def labels(revision: str) -> dict[str, str]:
    return {REVISION_LABEL: revision, "title": "operator"}


def config(container: str) -> dict[str, Any]:
    """As buildah writes it."""
    return {
        "created": f"2024-01-01T00:00:{container[:2]}Z",
        "container": container,
        "container_config": {"Hostname": container, "Cmd": ["run"]},
        "config": {
            "Hostname": container,
            "Image": "",
            "Cmd": ["run"],
            "Labels": {REVISION_LABEL: "unknown", "title": "operator"},
        },
        "architecture": "amd64",
        "os": "linux",
        "parent": f"sha256:{container}",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(LAYER).hexdigest()}"]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "COPY", "comment": f"FROM {container}"}],
    }


def write(path: Path, container: str) -> Path:
    """An archive with the files of an older format beside, as buildah writes them."""
    layer, written = f"{hashlib.sha256(LAYER).hexdigest()}.tar", json.dumps(config(container)).encode()
    name = f"{hashlib.sha256(written).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [NAME], "Layers": [layer]}]).encode()
    with tarfile.open(path, "w") as archive:
        for file, content in (
            (layer, LAYER),
            (name, written),
            (f"{container}/VERSION", b"1.0"),
            ("manifest.json", manifest),
        ):
            entry = tarfile.TarInfo(file)
            entry.size, entry.mtime = len(content), int(container[:2])
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_builds_of_the_same_image_have_the_same_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1.tar", "11aa"), write(tmp_path / "2.tar", "22bb")
    assert first.read_bytes() != second.read_bytes()
    assert normalize_archive(first, DATE, "abc") == normalize_archive(second, DATE, "abc")
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.tar", "2.tar"]


def test_the_image_keeps_its_layers_and_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "image.tar", "11aa")
    image = normalize_archive(path, DATE, "abc")
    with tarfile.open(path) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    (named,) = json.loads(contents["manifest.json"])
    assert set(contents) == {"manifest.json", named["Config"], *named["Layers"]}
    assert named["RepoTags"] == [NAME]
    assert f"sha256:{hashlib.sha256(contents[named['Config']]).hexdigest()}" == image
    kept = json.loads(contents[named["Config"]])
    assert kept["rootfs"]["diff_ids"] == [
        f"sha256:{hashlib.sha256(contents[layer]).hexdigest()}" for layer in named["Layers"]
    ]
    assert kept["config"] == {
        "Hostname": "",
        "Image": "",
        "Cmd": ["run"],
        "Labels": {REVISION_LABEL: "abc", "title": "operator"},
    }
    assert (kept["created"], kept["history"]) == (
        "2023-11-14T22:13:20Z",
        [{"created": "2023-11-14T22:13:20Z", "created_by": "COPY"}],
    )
