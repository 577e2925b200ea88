"""Installs PyTorch's build for CPUs, before pip takes the build with CUDA, which is several GB.

On Linux, PyPI has PyTorch only with CUDA. The builds for CPUs have the local version ``+cpu``, which no build with CUDA
has, so this program requires exactly that version, and never downloads anything else. It looks for it in the package
index that pip is configured for, which may be a mirror, then in the index that PyTorch publishes. The variable
TORCH_INDEX names another source: see docs/install.md.

``python tools/torch_for_cpu.py`` installs it for this Python; ``--download FOLDER`` puts the wheel into a folder. Uses
only the standard library and pip.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
VARIABLE = "TORCH_INDEX"
INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of PyTorch with its builds for CPUs."""
ANY_BUILD = "default"
"""The value of TORCH_INDEX that accepts the build of the configured package index, which may be the one with CUDA."""
SIZE = "200 MB to download, 700 MB on disk"
IMPATIENT = ("--retries=1", "--timeout=15")
"""For an index that may be unreachable: pip otherwise tries for minutes."""


class NoTorchError(Exception):
    """There is no build for CPUs; ``str()`` has the causes and the remedies."""


@dataclass(frozen=True)
class Source:
    """A place to look for the wheel, as words and as flags of pip."""

    name: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What pip did. ``error`` is its last error message; None if it succeeded."""

    error: str | None = None


Pip = Callable[[Sequence[str]], Outcome]


def pinned_version(constraints: str) -> str:
    """The version of torch in the constraints. Raises NoTorchError."""
    found = re.search(r"^torch==([^\s+;]+)", constraints, re.M)
    if found is None:
        raise NoTorchError(f"{CONSTRAINTS.name}: has no line torch==VERSION; add it")
    return found[1]


def sources(chosen: str, system: str) -> list[Source]:
    """Where to look for the build for CPUs, in this order; empty if the configured index may choose the build.

    ``chosen`` is the value of TORCH_INDEX, ``system`` is that of `platform.system`. Raises NoTorchError.
    """
    if chosen == ANY_BUILD or system != "Linux":
        return []
    if not chosen:
        return [Source("the configured package index"), Source(INDEX, ("--index-url", INDEX, *IMPATIENT))]
    if re.match(r"(https?|file)://", chosen):
        return [Source(chosen, ("--index-url", chosen))]
    if Path(chosen).is_dir():
        return [Source(f"the folder {chosen}", ("--no-index", "--find-links", chosen))]
    raise NoTorchError(
        f"{VARIABLE}={chosen}: is neither the URL of a package index, nor a folder with wheels, nor {ANY_BUILD!r}"
    )


def fetch(version: str, places: Sequence[Source], action: Sequence[str], pip: Pip, say: Callable[[str], None]) -> None:
    """Runs ``pip ACTION`` for the wheel from the first source that has it. Raises NoTorchError if none has it."""
    if not places:
        return
    failures = []
    for place in places:
        say(f"looking for PyTorch {version} for CPUs ({SIZE}, once) in {place.name}")
        outcome = pip([*action, "--no-deps", *place.flags, f"torch=={version}+cpu"])
        if outcome.error is None:
            return
        failures.append(f"  {place.name}: {outcome.error}")
    raise NoTorchError(explanation(version, failures))


def explanation(version: str, failures: Sequence[str]) -> str:
    """Why there is no build, and what to do."""
    return "\n".join(
        [
            f"no build of PyTorch {version} for CPUs was found, and the one with CUDA is several GB:",
            *failures,
            f"Give make one of these values of {VARIABLE}, for example make demo {VARIABLE}=FOLDER:",
            f"  URL      of a mirror of {INDEX}",
            "  FOLDER   with the wheel, which you download on another machine:",
            f"           pip download --no-deps --index-url {INDEX} torch=={version}+cpu",
            f"  {ANY_BUILD}  to install the build of the configured package index, with CUDA",
        ]
    )


def is_installed(version: str) -> bool:
    """Whether this Python has this version of torch, in any build."""
    try:
        return importlib.metadata.version("torch").partition("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def run_pip(words: Sequence[str]) -> Outcome:
    """Runs pip with this Python. Its progress is shown; its error messages are returned."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return Outcome()
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return Outcome(errors[-1] if errors else f"pip ended with {done.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs PyTorch's build for CPUs.")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="only put the wheel into this folder")
    folder = parser.parse_args().download
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    action = ["install", *quiet] if folder is None else ["download", *quiet, "--dest", str(folder)]
    try:
        version = pinned_version(CONSTRAINTS.read_text())
        if folder is None and is_installed(version):
            return 0
        places = sources(os.environ.get(VARIABLE, ""), platform.system())
        fetch(version, places, action, run_pip, lambda words: print(f"make: {words}", flush=True))
    except NoTorchError as error:
        print(f"make: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
