"""The file that `megatron-operator local` serves: reading, rejection, changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_operator.api.parse import InvalidResource
from megatron_operator.local.resource_file import ResourceFile

RESOURCE = """
apiVersion: inference.megatron.dev/v1alpha1
kind: MegatronInference
metadata: {name: chat}
spec:
  model: {source: {path: /models/a.gguf}}
  pods: {device: cpu}
"""

SECRET = """
apiVersion: v1
kind: Secret
metadata: {name: hf}
data: {token: aGlkZGVu}
stringData: {other: plain}
"""


@pytest.fixture
def file(tmp_path: Path) -> ResourceFile:
    path = tmp_path / "chat.yaml"
    path.write_text(RESOURCE)
    return ResourceFile(path)


def test_the_resource_is_read_with_the_secrets_in_the_same_file(file: ResourceFile) -> None:
    file.path.write_text(f"{SECRET}---\n{RESOURCE}")
    document = file.read()
    assert document.resource.name == "chat"
    assert document.secrets == {"hf": {"token": "hidden", "other": "plain"}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "line 1, column 5"),
        ("", "has 0 resources"),
        (f"{RESOURCE}---{RESOURCE}", "has 2 resources"),
        (RESOURCE.replace("model:", "modle:"), "spec.modle"),
        (
            RESOURCE.replace("/models/a.gguf", "models/a.gguf"),
            "spec.model.source.path: models/a.gguf: must be an absolute path",
        ),
        (f"{SECRET.replace('aGlkZGVu', 'a!')}---{RESOURCE}", "Secret.data.token"),
        (f"{SECRET.replace('plain', '123')}---{RESOURCE}", "Secret.stringData.other: (hidden): must be text"),
        (
            f"{SECRET.replace('{other: plain}', '[other]')}---{RESOURCE}",
            "Secret.stringData: (hidden): must be an object",
        ),
        (f"{SECRET.replace('{name: hf}', 'hf')}---{RESOURCE}", "Secret.metadata: (hidden): must be an object"),
    ],
)
def test_invalid_files_are_rejected_with_a_message(file: ResourceFile, text: str, words: str) -> None:
    file.path.write_text(text)
    with pytest.raises(InvalidResource) as refusal:
        file.read()
    assert words in str(refusal.value)


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidResource, match=r"nowhere\.yaml: No such file or directory"):
        ResourceFile(tmp_path / "nowhere.yaml").read()


def test_an_edit_takes_effect_when_the_file_stops_changing(file: ResourceFile) -> None:
    file.read()
    assert not file.has_changed()
    file.path.write_text(RESOURCE + "  replicas: 2\n")
    assert not file.has_changed()
    assert file.has_changed()
    assert file.read().resource.spec.replicas == 2
    assert not file.has_changed()


def test_a_file_that_an_editor_replaces_is_read_again(file: ResourceFile) -> None:
    file.read()
    file.path.unlink()
    assert not file.has_changed()
    assert not file.has_changed()
    file.path.write_text(RESOURCE + "  replicas: 3\n")
    file.has_changed()
    assert file.has_changed()


def test_a_rejected_edit_is_reported_once(file: ResourceFile) -> None:
    file.read()
    file.path.write_text("a: [")
    file.has_changed()
    assert file.has_changed()
    with pytest.raises(InvalidResource):
        file.read()
    assert not file.has_changed()
    assert not file.has_changed()
