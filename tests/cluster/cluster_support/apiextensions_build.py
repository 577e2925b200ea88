"""Builds the API server for custom resources from Debian's current packages: CRDs, defaults, CEL, strict fields, apply.

Debian sid packages Kubernetes' libraries as Go source, including apiextensions-apiserver with its main program. etcd is
from there too, because that server needs a recent version.
"""

import re
from pathlib import Path

from cluster_support import debian, go
from cluster_support.errors import ClusterSupportError, CommandFailedError
from cluster_support.progress import Progress

SUITE = "sid"
LIBRARY = "golang-k8s-apiextensions-apiserver-dev"
PACKAGES = Path(__file__).with_name("apiextensions-packages.txt")
"""The packages that the compiler reads: a tenth of the size of all dependencies of LIBRARY."""
PROGRAMS = ("etcd", "apiextensions-apiserver")
VERSION_FILE = "apiextensions-apiserver.version"
"""File with the version, because the server has no command line option for it."""


def build(workspace: Path, progress: Progress) -> Path:
    """Builds in an empty folder; returns its subfolder with PROGRAMS and VERSION_FILE."""
    apt = debian.Apt(_folder(workspace, "apt"), workspace / "build.log")
    apt.update(debian.archive_uri(), SUITE)
    made = _folder(workspace, "bin")
    try:
        _build(apt, PACKAGES.read_text().split(), _folder(workspace, "listed"), made, progress)
    except CommandFailedError:
        progress(f"the packages of {PACKAGES.name} are no longer sufficient: using all dependencies of {LIBRARY}")
        needed = [name for name in apt.dependencies(LIBRARY, recursive=True) if re.fullmatch(r"golang-.*-dev", name)]
        _build(apt, [LIBRARY, *needed], _folder(workspace, "all"), made, progress)
    return made


def version_in(folder: Path) -> str:
    """The version of Kubernetes, such as v1.36.4, of the server for custom resources in ``folder``."""
    return (folder / VERSION_FILE).read_text().strip()


def _build(apt: debian.Apt, libraries: list[str], workspace: Path, made: Path, progress: Progress) -> None:
    debs, root = _folder(workspace, "debs"), _folder(workspace, "root")
    progress(f"downloading {len(libraries)} packages of Kubernetes' libraries, Go and etcd from Debian {SUITE}")
    (compiler,) = (name for name in apt.dependencies("golang-go") if re.fullmatch(r"golang-[\d.]+-go", name))
    release = compiler.split("-")[1]
    apt.download([compiler, f"golang-{release}-src", "etcd-server", *libraries], debs)
    debian.unpack(debs, root, workspace / "unpack.log")
    _publish_openapi(root / "usr/share/gocode/src/k8s.io/apiextensions-apiserver/pkg/apiserver/apiserver.go")
    version = _version(debs)
    progress(f"compiling apiextensions-apiserver {version} (about 4 minutes of processor time)")
    stamps = go.version_flags(version, "k8s.io/component-base/version")
    compile_ = go.Go(root / f"usr/lib/go-{release}", root / "usr/share/gocode", workspace)
    compile_.build(workspace, progress, stamps, "-o", f"{made}/", "k8s.io/apiextensions-apiserver")
    (root / "usr/bin/etcd").rename(made / "etcd")
    (made / VERSION_FILE).write_text(f"v{version}\n")


def _version(debs: Path) -> str:
    """The version of the Kubernetes release: the library of 1.36.4 is version 0.36.4."""
    (package,) = debs.glob(f"{LIBRARY}_*.deb")
    match = re.search(r"_0\.(\d+\.\d+)", package.name)
    assert match is not None, package
    return f"1.{match.group(1)}"


def _publish_openapi(source: Path) -> None:
    """A standalone server has no OpenAPI v2, and would not publish custom resources in OpenAPI v3 either."""
    text, condition = source.read_text(), "if s.GenericAPIServer.StaticOpenAPISpec != nil {"
    if condition not in text:
        raise ClusterSupportError(f"{source} has no line '{condition}': the patch does not fit this source")
    source.write_text(text.replace(condition, "{"))


def _folder(workspace: Path, name: str) -> Path:
    folder = workspace / name
    folder.mkdir(parents=True)
    return folder
