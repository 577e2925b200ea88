"""The shell of a reader of the docs, and the comparison of what it prints with what they show."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from suite_support.doc_blocks import ROOT

SECONDS = 120
OWN_VARIABLES = ("MEGATRON_", "KUBE", "HELM_", "XDG_CACHE_HOME")
"""Beginnings of variables that the reader does not have."""
VARIES = {"AGE": r"\d+[smhd]\S*", "DURATION": r"\d+[smhd]\S*"}
"""Columns whose values differ from those of the docs, with what they match."""
HASH = re.compile(r"\b[0-9a-f]{12}\b")


class DocShell:
    """bash in a checkout, in which the reader can also write files.

    The checkout has links to the entries of this one. ``programs`` come first in PATH, then those of this Python
    environment, as after ``. .venv/bin/activate``.
    """

    def __init__(self, folder: Path, programs: Mapping[str, Path] | None = None, **environment: str) -> None:
        self.checkout = folder / "checkout"
        self.home = folder / "home"
        first = folder / "bin"
        for made in (self.checkout, self.home, first):
            made.mkdir(parents=True)
        for entry in ROOT.iterdir():
            if not entry.name.startswith("."):
                (self.checkout / entry.name).symlink_to(entry)
        for name, program in (programs or {}).items():
            (first / name).symlink_to(program)
        path = [str(first), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
        self.environment = {
            **kept,
            "PATH": os.pathsep.join(path),
            "HOME": str(self.home),
            "NO_PROXY": "*",
            **environment,
        }

    def keep_models(self, folder: Path) -> None:
        """Makes the folder that of the models in the reader's cache folder."""
        cache = self.home / ".cache/megatron-inference"
        cache.mkdir(parents=True)
        (cache / "models").symlink_to(folder)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the reader into the checkout."""
        path = self.checkout / name
        path.parent.mkdir(exist_ok=True)
        assert not path.parent.is_symlink(), f"{path.parent} is that of the tests; see `own`"
        path.write_text(text)

    def own(self, folder: str) -> Path:
        """Makes a copy of a folder in place of its link, for changes; returns its path."""
        link = self.checkout / folder
        original = link.resolve()
        link.unlink()
        return Path(shutil.copytree(original, link))

    def run(self, command: str, *, code: int = 0, seconds: float = SECONDS) -> str:
        """What the command prints. Raises AssertionError if its exit code is another one."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.checkout,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def words(self, command: str) -> list[str]:
        """The words that run a single command in the checkout as one process; words that follow are added to it."""
        return ["bash", "-c", f'cd {shlex.quote(str(self.checkout))} && exec {command} "$@"', "bash"]

    @contextmanager
    def running(self, command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A command that does not end by itself, and prints into ``log``. At the end it gets the SIGINT of Ctrl-C."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                # Background jobs of scripts ignore SIGINT, and so do their processes.
                ["env", "--default-signal=INT", "bash", "-c", command],
                cwd=self.checkout,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
            assert process.poll() is None, f"{command}: exit code {process.returncode}\n{log.read_text()}"
            os.killpg(process.pid, signal.SIGINT)
            process.wait(SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def assert_table(shown: str, printed: str) -> None:
    """A table in the docs is the printed one: the same rows in all columns that the docs have.

    Ages may differ, and hashes too, but equal ones in the docs are equal.
    """
    expected, found = _rows(shown), _rows(printed)
    assert len(found) == len(expected), printed
    for row, of_docs in zip(found, expected, strict=True):
        for column, value in of_docs.items():
            pattern = VARIES.get(column, "") if value else ""
            is_same = re.fullmatch(pattern, row[column]) if pattern else row[column] == value
            assert is_same, f"{column} is {row[column]!r}, and in the docs {value!r}:\n{printed}"


def _rows(table: str) -> list[dict[str, str]]:
    hashes = list(dict.fromkeys(HASH.findall(table)))
    header, *rows = HASH.sub(lambda match: f"{hashes.index(match[0]):012}", table).splitlines()
    columns = [(match[0], match.start()) for match in re.finditer(r"\S+", header)]
    ends = [start for _, start in columns[1:]] + [len(max(rows, key=len, default=header))]
    return [{name: row[start:end].strip() for (name, start), end in zip(columns, ends, strict=True)} for row in rows]
