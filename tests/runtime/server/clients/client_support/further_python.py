"""A separate Python environment, in the cache folder, for clients that conflict with the packages of the tests.

Its packages are those of ``python/requirements.txt`` and ``python/constraints.txt``.
"""

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from cluster_support.cache import Kept, cache_folder, kept
from cluster_support.errors import NoClientError
from cluster_support.processes import run_guarded
from cluster_support.progress import Progress, Say

SOURCE = Path(__file__).parent.parent / "python"
REQUIREMENTS, CONSTRAINTS = SOURCE / "requirements.txt", SOURCE / "constraints.txt"
PYTHON = "bin/python"
FINISHED = "finished"
LONGEST_RUN = 170.0  # seconds


def find(env: Mapping[str, str]) -> Path:
    """The interpreter. Raises NoClientError."""
    folder = _folder(env)
    if not _is_complete(folder):
        raise NoClientError(f"there is no {folder}: run `make clients` once to make it")
    return folder / PYTHON


def find_or_fetch(env: Mapping[str, str], say: Say) -> Path:
    """The same; creates the environment first if it is missing."""
    return kept(Kept("Python-clients", _folder(env), "1.3 GB of disk", _is_complete, _fetch), say) / PYTHON


def run(*words: object, **environment: str) -> str:
    """Runs the interpreter with one thread and without network access; returns its output."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "no_proxy": "*"}
    env = {**os.environ, **quiet, **environment}
    command = [str(find(os.environ)), *map(str, words)]
    done = subprocess.run(command, env=env, cwd=SOURCE, capture_output=True, text=True, timeout=LONGEST_RUN)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _folder(env: Mapping[str, str]) -> Path:
    content = REQUIREMENTS.read_bytes() + CONSTRAINTS.read_bytes()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder(env) / f"python-{version}-clients-{hashlib.sha256(content).hexdigest()[:12]}"


def _is_complete(folder: Path) -> bool:
    return (folder / FINISHED).exists()


def _fetch(workspace: Path, progress: Progress) -> Path:
    made = workspace / "made"
    venv.create(made, with_pip=True)
    progress("installing what python/constraints.txt names")
    install = [made / PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run_guarded([*install, "--constraint", CONSTRAINTS, "--requirement", REQUIREMENTS], workspace / "log")
    (made / FINISHED).touch()
    return made
