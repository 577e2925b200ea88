"""The commands in the docs exist, with the flags that the docs give them; their files and images exist too."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from suite_support.doc_blocks import ROOT, doc_blocks

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.cli import app as operator_app
from megatron_operator.cli import plugin_app
from megatron_runtime.cli import app as serve_app

Words = Sequence[str]
MAKEFILE = (ROOT / "Makefile").read_text()
READERS_FILES = {"my-model.yaml", "chat.yaml", "wheels", "chat-checkpoint/"}
"""Files and folders that the reader of the docs has."""
SHELL = {
    ".": "changes the shell",
    "kill": "acts on a job of the shell",
    "printf": "prints the standard input of the next command",
    "cp": "is not part of this project",
    "diff": "is not part of this project",
    "sha256sum": "is not part of this project; the checksums are tested in tests/operator/test_release.py",
    "twine": "is not installed",
    "skopeo": "is run by tests/cluster/test_publishing.py",
    "curl": "is run by test_docs_examples.py",
}
"""Commands that are not checked here, with the reason."""


def commands() -> list[list[str]]:
    """Every different command in the docs."""
    found = {shlex.join(words): words for block in doc_blocks("console", "bash") for words in block.commands}
    return list(found.values())


def parse(app: typer.Typer, words: Words) -> None:
    """Parses a command line without running it. Raises the parser's error."""
    command: Any = typer.main.get_command(app)
    rest, parent = list(words[1:]), None
    while True:
        context = command.make_context(words[0], rest, parent=parent)
        rest = [*context._protected_args, *context.args] if hasattr(command, "commands") else []
        if not rest:
            return
        _, command, rest = command.resolve_command(context, rest)
        parent = context


def check_make(words: Words) -> None:
    for word in words[1:]:
        variable, separator, _ = word.partition("=")
        if separator:
            assert re.search(rf"\b{variable}\b", MAKEFILE) or variable == "TORCH_INDEX", word
        else:
            assert re.search(rf"^{word}:", MAKEFILE, re.M), f"no target {word}"


def check_kubectl(words: Words) -> None:
    """kubectl itself parses the flags; with --help it needs no cluster."""
    if words[1] == "megatron":
        return parse(plugin_app, ["kubectl megatron", *words[2:]])
    program = Path(sysconfig.get_path("scripts")) / "kubectl"
    done = subprocess.run([program, *words[1:], "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"kubectl {words[1]}" in done.stdout
    for flag, value in pairwise(words):
        if flag in ("-f", "-k") and value not in READERS_FILES:
            assert (ROOT / value).exists(), value
        if flag == "-p":
            assert json.loads(value)["spec"].keys() == {"lifecycle"}
            assert Lifecycle(json.loads(value)["spec"]["lifecycle"])
    return None


def check_docker(words: Words) -> None:
    """``docker build`` has an existing Dockerfile and its arguments."""
    if words[1] in ("load", "tag", "push"):
        return
    given = [value for flag, value in pairwise(words) if flag in ("-f", "--file")]
    (dockerfile,) = given
    if dockerfile == "-":
        return
    text = (ROOT / dockerfile).read_text()
    for flag, value in pairwise(words):
        if flag == "--build-arg":
            assert f"ARG {value.partition('=')[0]}" in text, value


def check_helm(words: Words) -> None:
    """The chart is there and has the values; tests/cluster/test_chart_rendering.py renders it."""
    values = yaml.safe_load((ROOT / "charts/megatron-inference/values.yaml").read_text())
    for flag, value in pairwise(words):
        if flag == "--set":
            found: Any = values
            for step in value.partition("=")[0].split("."):
                found = found[step]
    if words[1] in ("install", "upgrade") and not words[3].startswith("oci://"):
        assert (ROOT / words[3] / "Chart.yaml").exists()
    if words[1] == "install":
        assert any(word.startswith("registry=") for word in words), "the chart requires a registry"


@cache
def flags_of(program: str) -> set[str]:
    """The flags of a program in Python, from its help."""
    command = [sys.executable, ROOT / program, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(re.findall(r"--[\w-]+", done.stdout))


def check_python(words: Words) -> None:
    module, arguments = (words[2], words[3:]) if words[1] == "-m" else (None, words[1:])
    if module == "pytest":
        for word in arguments:
            assert not word.startswith("tests") or list(ROOT.glob(word)), word
    elif module is not None:
        assert importlib.util.find_spec(module), module
    else:
        assert {word for word in arguments if word.startswith("--")} - flags_of(arguments[0]) == set()


def check_kind(words: Words) -> None:
    """The images that it loads are built by other commands in the docs."""
    if words[1:3] != ["load", "docker-image"]:
        assert words[1:] == ["create", "cluster"]
        return
    built = {word for other in commands() if other[:2] == ["docker", "build"] for word in other}
    assert set(words[3:]) <= built


CHECKS: dict[str, Callable[[Words], None]] = {
    "megatron-serve": lambda words: parse(serve_app, words),
    "megatron-operator": lambda words: parse(operator_app, words),
    "make": check_make,
    "kubectl": check_kubectl,
    "docker": check_docker,
    "helm": check_helm,
    "python": check_python,
    "python3": check_python,
    ".venv/bin/python": check_python,
    "kind": check_kind,
}


@pytest.mark.parametrize("words", commands(), ids=shlex.join)
def test_the_command_is_valid(words: list[str]) -> None:
    if words[0] not in SHELL:
        CHECKS[words[0]](words)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("megatron-serve --modle PATH", "No such option"),
        ("megatron-serve model get", "No such command"),
        ("megatron-operator local", "Missing parameter: file"),
        ("kubectl megatron suspend chat --forever", "No such option"),
        ('kubectl patch mi chat -p \'{"spec": {"lifecycle": "Asleep"}}\'', "not a valid Lifecycle"),
        ("kubectl wait mi chat --fro=condition=Ready", "unknown flag: --fro"),
        ("kubectl apply -f manifests/none.yaml", "none.yaml"),
        ("make serv", "no target serv"),
        ("helm install megatron charts/megatron-inference", "requires a registry"),
        ("helm upgrade megatron charts/megatron-inference --set image.repo=other", "repo"),
        ("docker build -f operator/Dockerfile --build-arg DEVISE=cpu .", "DEVISE"),
        ("python examples/offline_inference.py --prompt Water", "--prompt"),
        ("python -m pytest tests/none", "tests/none"),
        ("kind load docker-image localhost/megatron-inference/other:1", "other:1"),
    ],
)
def test_an_invalid_command_is_found(line: str, problem: str) -> None:
    words = shlex.split(line)
    with pytest.raises(Exception, match=problem):  # each program's parser has errors of its own
        CHECKS[words[0]](words)


def test_every_exception_has_a_command() -> None:
    assert SHELL.keys() <= {words[0] for words in commands()}
