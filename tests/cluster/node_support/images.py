"""Builds the project's images from its Dockerfiles with buildah, without a registry and without the network.

The base images are built from Debian's packages; that of the tests has the name in FROM. pip installs from a folder of
wheels. Layers are cached in the cache folder, and images of the same sources are built once.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster_support import debian
from cluster_support.cache import Kept, cache_folder, kept
from cluster_support.processes import run_guarded
from cluster_support.progress import Progress, Say, say_at_once
from node_support.tools import NodeTools

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tools"))

from requirements import requirements  # noqa: E402
from torch_for_cpu import pinned_version  # noqa: E402

LEFT_OUT = ("doc", "info", "locale", "man")
HOOKS = (
    # As in the official image, whose Dockerfile deletes them.
    'find "$1" -name "*.pyc" -delete',
    # mmdebstrap copies these of this machine, with modes that depend on the umask.
    'for each in apt/sources.list hostname resolv.conf; do install --mode=644 /dev/null "$1/etc/$each"; done',
)
"""What is changed in a base image, whose root is ``$1``."""
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
OLD = 86400.0
"""Age in seconds after which images of other sources are deleted."""


@dataclass(frozen=True)
class Base:
    """A base image of Debian's packages."""

    name: str
    packages: tuple[str, ...]


PYTHON = Base(
    "docker.io/library/python:3.11-slim-bookworm", ("ca-certificates", "libstdc++6", "python3", "python3-venv")
)
PYTHON_WITH_COMPILER = Base("localhost/python-gcc:1", (*PYTHON.packages, "gcc", "libc6-dev", "libpython3-dev"))


@dataclass(frozen=True)
class Image:
    """An image. ``wheels_for``: extras of the distribution; ``is_loaded``: nodes load it, not only builds;
    ``device``: its build argument DEVICE, if it is not the default."""

    name: str
    dockerfile: str
    wheels_for: tuple[str, ...] = ()
    is_loaded: bool = True
    base: Base = PYTHON
    device: str | None = None

    @property
    def archive(self) -> str:
        return f"{self.name.rpartition('/')[2].replace(':', '-')}.tar"


OPERATOR = Image("localhost/megatron-inference/operator:0.1.0", "operator/Dockerfile", ("operator",))
RUNTIME = Image(
    "localhost/megatron-inference/runtime:0.1.0-cpu",
    "runtime/Dockerfile",
    ("runtime", "tracing", "object-storage"),
    is_loaded=False,
)
RUNTIME_FOR_CUDA = Image(
    "localhost/megatron-inference/runtime:0.1.0-cuda",
    "runtime/Dockerfile",
    RUNTIME.wheels_for,
    is_loaded=False,
    base=PYTHON_WITH_COMPILER,
    device="cuda",
)
SMOLLM2 = Image("localhost/megatron-inference/runtime-smollm2:0.1.0", "manifests/samples/smollm2.Dockerfile")
PAUSE = Image("localhost/pause:1", "tests/cluster/node_support/pause.Dockerfile")
ALL = (OPERATOR, RUNTIME, SMOLLM2, PAUSE)
"""The images of the tests."""
RELEASED = (OPERATOR, RUNTIME, RUNTIME_FOR_CUDA)


def build(env: Mapping[str, str], say: Say, tools: NodeTools) -> Path:
    """Builds the images; returns the folder with their archives and `sizes.json`, bytes by name. Raises
    ClusterSupportError."""
    cache = cache_folder(env)
    folder = cache / f"images-{_digest(_sources())}"
    layers = _layers(cache)
    effort = "5 minutes and 5 GB the first time; later only changes"
    built = kept(Kept("Images", folder, effort, _are_complete, lambda into, say: _build(into, say, layers, tools)), say)
    for other in [*cache.glob("images-*"), *cache.glob("layers-*")]:
        if other not in (built, layers) and other.is_dir() and time.time() - other.stat().st_mtime > OLD:
            shutil.rmtree(other, ignore_errors=True)
    return built


def export(image: Image, target: Path, env: Mapping[str, str], tools: NodeTools) -> int:
    """Writes an image to an archive for `docker load`; returns the bytes of the unpacked image. `build` has built those
    of the tests; others are built first. Raises ClusterSupportError."""
    with builder(image, env, tools) as made:
        if image not in ALL:
            made.make(image)
        made.push(image, target)
        return made.size(image)


@contextmanager
def builder(image: Image, env: Mapping[str, str], tools: NodeTools) -> Iterator["Builder"]:
    """The builder of an image, with a temporary workspace."""
    layers = _layers(cache_folder(env), image.device)
    layers.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layers.parent) as workspace:
        yield Builder(Path(workspace), Progress(say_at_once), layers, tools)


def _layers(cache: Path, device: str | None = None) -> Path:
    """The storage of buildah for the current pins. `build` deletes storages that are not its own after OLD."""
    pins = _digest(iter((ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__))))
    return cache / "-".join(filter(None, ("layers", device, pins)))


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the unpacked images by name."""
    found: dict[str, int] = json.loads((folder / "sizes.json").read_text())
    return found


def _are_complete(folder: Path) -> bool:
    archives = [folder / image.archive for image in ALL if image.is_loaded]
    return all(archive.exists() for archive in archives) and (folder / "sizes.json").exists()


def _sources() -> Iterator[Path]:
    """All sources of the images; they also pin the downloads."""
    yield from (ROOT / name for name in ("pyproject.toml", "constraints.txt", "LICENSE", ".dockerignore"))
    yield ROOT / "tools/requirements.py"
    yield Path(__file__)
    yield from (ROOT / image.dockerfile for image in ALL)
    for package in ("operator/megatron_operator", "runtime/megatron_runtime"):
        yield from sorted(
            path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )


def _digest(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _build(workspace: Path, progress: Progress, layers: Path, tools: NodeTools) -> Path:
    return Builder(workspace, progress, layers, tools).run()


class Builder:
    """Buildah with one storage. Its methods raise ClusterSupportError."""

    def __init__(self, workspace: Path, progress: Progress, layers: Path, tools: NodeTools) -> None:
        self.progress = progress
        self.models = layers.parent / "models"
        self.tools = tools
        self.log = workspace / "log"
        self.workspace = workspace
        self.made = workspace / "made"
        self.made.mkdir()
        self.storage = layers

    def run(self) -> Path:
        """Builds the images of the tests."""
        sizes = {}
        for image in ALL:
            self.make(image)
            sizes[image.name] = self.size(image)
            if image.is_loaded:
                self.push(image, self.made / image.archive)
        (self.made / "sizes.json").write_text(json.dumps(sizes, indent=1))
        return self.made

    def make(self, image: Image) -> None:
        """Builds an image, with its base and its wheels if they are missing."""
        self._make_base(image.base)
        wheels = self._wheels(image)
        self.progress(f"building {image.name}")
        self._build_image(image, wheels)

    def push(self, image: Image, target: Path) -> None:
        """Writes the archive of a built image."""
        self.buildah("push", *self._policy, image.name, f"docker-archive:{target}:{image.name}")

    def _make_base(self, base: Base) -> None:
        if base.name in self._names():
            return
        self.progress(f"making the base image from Debian's packages: {', '.join(base.packages)}")
        tar = self.workspace / "base.tar"
        left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
        archive = f"deb [signed-by={debian.KEYRING}] {debian.archive_uri()} {debian.SUITE} main"
        quick = "--dpkgopt=force-unsafe-io"  # a crash discards the files anyway
        mmdebstrap = [self.tools.program("mmdebstrap"), "--mode=root", "--variant=essential", quick, *left_out]
        # With the date of the files, mmdebstrap leaves out logs and ids that differ between builds.
        environment = {**self._environment, "TMPDIR": str(self.workspace), "SOURCE_DATE_EPOCH": "0"}
        hooks = [f"--customize-hook={hook}" for hook in HOOKS]
        command = [*mmdebstrap, f"--include={','.join(base.packages)}", *hooks, debian.SUITE, tar, archive]
        run_guarded(_private(command), self.log, env=environment)
        (self.workspace / "base").mkdir()
        (self.workspace / "base/Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n')
        tar.rename(self.workspace / "base/base.tar")
        self.buildah("bud", *self._policy, "--timestamp=0", f"--tag={base.name}", str(self.workspace / "base"))

    def _wheels(self, image: Image) -> Path:
        """A folder with all wheels for pip, of this image or those of the tests."""
        folder = self.storage / "wheels"
        if not folder.exists():
            self.progress("downloading wheels")
            partial = self.workspace / "wheels"
            sharing = ALL if image in ALL else (image,)
            required = self.workspace / "required.txt"
            required.write_text("\n".join(requirements([extra for each in sharing for extra in each.wheels_for])))
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
            builds = ["hatchling>=1.25"]
            if image.device == "cuda":
                # Without a local version like +cpu, which pip would prefer.
                builds.append(f"torch==={pinned_version((ROOT / 'constraints.txt').read_text())}")
            else:
                # pip prefers this wheel to the build with CUDA, because its local version is later.
                run_guarded([sys.executable, str(ROOT / "tools/torch_for_cpu.py"), "--download", partial], self.log)
            pins = ["--find-links", partial, "--constraint", ROOT / "constraints.txt", "--requirement", required]
            run_guarded([*pip, *pins, "--dest", partial, *builds], self.log, on_wait=self.wait)
            partial.rename(folder)
        return folder

    def _build_image(self, image: Image, wheels: Path) -> None:
        contexts = [f"--build-context=wheels={wheels}"] if image.wheels_for else []
        folder = self.context(image)
        if image is PAUSE:
            folder.mkdir()
            shutil.copy(self.tools.program("busybox"), folder / "busybox")
        flags = ["--pull-never", "--format=docker", "--layers", "--timestamp=0", "--network=none", "--isolation=oci"]
        if image.base is not PYTHON:
            flags.append(f"--build-arg=PYTHON_IMAGE={image.base.name}")
        if image.device is not None:
            flags.append(f"--build-arg=DEVICE={image.device}")
        self.buildah(
            "bud", *self._policy, *flags, f"--runtime={self.tools.program('runc')}", *contexts,
            "--build-arg=PIP_NO_INDEX=1", f"--file={ROOT / image.dockerfile}", f"--tag={image.name}", str(folder),
        )  # fmt: skip

    def context(self, image: Image) -> Path:
        """The folder whose files an image is built from."""
        return {SMOLLM2: self.models, PAUSE: self.workspace / "pause"}.get(image, ROOT)

    def _names(self) -> set[str]:
        listed = self.asked("images", "--format={{.Name}}:{{.Tag}}")
        return set(listed.split())

    def size(self, image: Image) -> int:
        """Bytes of an unpacked image."""
        (listed,) = json.loads(self.asked("images", "--json", image.name))
        return _bytes(listed["size"])

    def asked(self, *words: str) -> str:
        """What a command of buildah prints."""
        answer = self.workspace / "answer"
        answer.unlink(missing_ok=True)
        self.buildah(*words, log=answer)
        return answer.read_text()

    @property
    def _policy(self) -> list[str]:
        return [f"--signature-policy={self.tools.signature_policy}"]

    @property
    def _environment(self) -> dict[str, str]:
        registries = self.workspace / "registries.conf"
        registries.write_text("unqualified-search-registries = []\n")
        settings = {
            "CONTAINERS_REGISTRIES_CONF": str(registries),
            "CONTAINERS_CONF": os.devnull,
            "TMPDIR": str(self.workspace),
        }
        return {
            **self.tools.environment,
            **settings,
            "HOME": str(self.workspace),
            "XDG_RUNTIME_DIR": str(self.workspace),
        }

    def buildah(self, *words: str, log: Path | None = None) -> None:
        """Runs a command of buildah."""
        self.run_privately([*self.command, *words], log)

    @property
    def command(self) -> list[str | Path]:
        """buildah with its storage."""
        storage = ["--storage-driver=overlay", f"--root={self.storage / 'root'}", f"--runroot={self.workspace / 'run'}"]
        self.storage.mkdir(exist_ok=True)
        return [self.tools.program("buildah"), *storage]

    def run_privately(self, command: Sequence[str | Path], log: Path | None = None) -> None:
        """Runs a command whose processes and mounts end with it."""
        run_guarded(_private(command), log or self.log, env=self._environment, on_wait=self.wait)

    def wait(self) -> None:
        """Reports that a command still runs."""
        self.progress("  ...")


def _private(command: Sequence[str | Path]) -> list[str | Path]:
    """Runs it in namespaces, so that its processes and mounts end with it."""
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private", *command]


def _bytes(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * 1000 ** ("B", "KB", "MB", "GB").index(unit.upper()))
