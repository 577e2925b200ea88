"""The programs that were built once, kept by the version of their source."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cluster_support import kubernetes_build
from cluster_support.errors import NoKubernetesError
from cluster_support.progress import Progress, Say

Builder = Callable[[Path, Progress], Path]


def cache_folder(env: Mapping[str, str]) -> Path:
    """The project's cache on this machine; it need not exist."""
    if chosen := env.get("MEGATRON_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    if shared := env.get("XDG_CACHE_HOME"):
        return Path(shared, "megatron-inference")
    return Path.home() / ".cache/megatron-inference"


def kubernetes_folder(env: Mapping[str, str]) -> Path:
    """Where the built programs lie, or will."""
    return cache_folder(env) / f"kubernetes-{kubernetes_build.SOURCE_VERSION}"


def is_complete(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in kubernetes_build.PROGRAMS)


def built_kubernetes(env: Mapping[str, str], say: Say, build: Builder = kubernetes_build.build) -> Path:
    """The folder with the programs, built first if need be.

    A folder under its final name is always complete: the build happens beside it and is renamed at the end. Of several
    runs at once, one builds and the others wait for it.
    """
    folder = kubernetes_folder(env)
    if is_complete(folder):
        return folder
    _make_cache(folder.parent)
    with _locked(folder, say):
        if not is_complete(folder):
            _build_beside(folder, say, build)
    return folder


def _make_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NoKubernetesError(f"cannot make the cache folder {folder} ({error}): set MEGATRON_CACHE_DIR") from error


@contextlib.contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is building Kubernetes in {folder.parent}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_beside(folder: Path, say: Say, build: Builder) -> None:
    prefix = "kubernetes-building-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # ours is the lock: its builder is dead
    workspace = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    progress = Progress(say)
    progress(f"building Kubernetes {kubernetes_build.VERSION} into {folder} (once; 5 to 10 minutes, 3 GB meanwhile)")
    try:
        built = build(workspace, progress)
        shutil.rmtree(folder, ignore_errors=True)
        built.rename(folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    progress("Kubernetes is built")
