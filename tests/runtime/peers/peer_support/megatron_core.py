"""An environment with Megatron Core, in the cache folder.

It has the packages of the environment of the tests, and those of ``requirements.txt``: models of Megatron and this
project's runtime share a process there.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

from cluster_support.cache import Kept, cache_folder, kept
from cluster_support.errors import NoClientError
from cluster_support.processes import run_guarded
from cluster_support.progress import Progress, Say

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[2]
REQUIREMENTS = HERE / "requirements.txt"
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
    return kept(Kept("Megatron-Core", _folder(env), "4 MB to download", _is_complete, _fetch), say) / PYTHON


def run(script: str, *words: object) -> str:
    """Runs a script beside the requirements with one thread; returns its output."""
    folders = [ROOT / "runtime", ROOT / "tools", ROOT / "tests/runtime"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [str(find(os.environ)), str(HERE / script), *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_RUN)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _folder(env: Mapping[str, str]) -> Path:
    content = REQUIREMENTS.read_bytes() + sysconfig.get_paths()["purelib"].encode()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder(env) / f"python-{version}-megatron-core-{hashlib.sha256(content).hexdigest()[:12]}"


def _is_complete(folder: Path) -> bool:
    return (folder / FINISHED).exists()


def _fetch(workspace: Path, progress: Progress) -> Path:
    made = workspace / "made"
    venv.create(made, with_pip=False)
    packages = next((made / "lib").glob("python*")) / "site-packages"
    (packages / "tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    progress("installing what tests/runtime/peers/requirements.txt names")
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    run_guarded([*install, "--target", packages, "--requirement", REQUIREMENTS], workspace / "log")
    (made / FINISHED).touch()
    return made
