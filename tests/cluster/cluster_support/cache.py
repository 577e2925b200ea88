"""A cache for downloads and builds of the tests, by version."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_support import core_build, kubernetes_build
from cluster_support.errors import ClusterSupportError
from cluster_support.progress import Progress, Say

Builder = Callable[[Path, Progress], Path]


@dataclass(frozen=True)
class Kept:
    """An entry of the cache. ``make`` gets an empty folder, and returns the subfolder to cache."""

    name: str
    folder: Path
    effort: str
    """The effort to make it, as a message for users."""
    is_complete: Callable[[Path], bool]
    make: Builder


def cache_folder(env: Mapping[str, str]) -> Path:
    """The project's cache folder, which may not exist."""
    if chosen := env.get("MEGATRON_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    if shared := env.get("XDG_CACHE_HOME"):
        return Path(shared, "megatron-inference")
    return Path.home() / ".cache/megatron-inference"


def kubernetes_folder(env: Mapping[str, str]) -> Path:
    """The folder of the built programs, which may not exist."""
    return cache_folder(env) / f"kubernetes-{core_build.VERSION}-with-custom-resources-{kubernetes_build.RECIPE}"


def is_complete(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in kubernetes_build.PROGRAMS)


def built_kubernetes(env: Mapping[str, str], say: Say, build: Builder = kubernetes_build.build) -> Path:
    """The folder with the programs; builds them first if they are missing."""
    effort = "6 to 10 minutes on 2 cores, 200 MB to download, 4 GB of disk during the build"
    return kept(Kept("Kubernetes", kubernetes_folder(env), effort, is_complete, build), say)


def kept(thing: Kept, say: Say) -> Path:
    """The folder of the entry; makes it first if it is missing.

    A folder with its final name is always complete: it is made under another name and renamed at the end. Of several
    concurrent runs, one makes it and the others wait.
    """
    if thing.is_complete(thing.folder):
        return thing.folder
    _make_cache(thing.folder.parent)
    with _locked(thing, say):
        if not thing.is_complete(thing.folder):
            _make_beside(thing, say)
    return thing.folder


def _make_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot create the cache folder {folder} ({error}): set MEGATRON_CACHE_DIR"
        raise ClusterSupportError(message) from error


@contextlib.contextmanager
def _locked(thing: Kept, say: Say) -> Iterator[None]:
    with thing.folder.with_name(f"{thing.folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is making {thing.folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_beside(thing: Kept, say: Say) -> None:
    prefix = f"{thing.name.lower()}-building-"
    for leftover in thing.folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # this run holds the lock: the builder has ended
    workspace = Path(tempfile.mkdtemp(prefix=prefix, dir=thing.folder.parent))
    progress = Progress(say)
    progress(f"making {thing.name} in {thing.folder} (once; {thing.effort})")
    try:
        made = thing.make(workspace, progress)
        shutil.rmtree(thing.folder, ignore_errors=True)
        made.rename(thing.folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    progress(f"{thing.name} is made")
