"""Makes the environment of the clients that cannot share that of the tests, in the cache folder.

`python tests/clients/prepare.py CACHE_FOLDER`. What the environment holds is told by requirements.txt and
constraints.txt; when these change, another one is made.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
FILES = (HERE / "requirements.txt", HERE / "constraints.txt")


def environment(cache: Path) -> Path:
    """The folder of the environment in the cache folder."""
    content = b"".join(file.read_bytes() for file in FILES)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache / f"clients-{version}-{hashlib.sha256(content).hexdigest()[:12]}"


def prepare(cache: Path) -> Path:
    """Makes the environment unless it is there and whole; its Python."""
    folder = environment(cache)
    python, finished = folder / "bin" / "python", folder / "finished"
    if not finished.exists():
        print(f"making the environment of further clients in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*install, "--constraint", FILES[1], "--requirement", FILES[0]], check=True)
        finished.touch()
    return python


if __name__ == "__main__":
    print(f"further clients: {prepare(Path(sys.argv[1]))}")
