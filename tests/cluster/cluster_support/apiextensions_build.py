"""The API server of custom resources from Debian's current packages: definitions, defaults, CEL, strict fields, apply.

Debian sid packages Kubernetes' libraries as Go source. Among them is apiextensions-apiserver, main program included.
etcd comes from there too: it is new enough for that server.
"""

import re
from pathlib import Path

from cluster_support import debian, go
from cluster_support.errors import ClusterSupportError, CommandFailedError
from cluster_support.progress import Progress

SUITE = "sid"
LIBRARY = "golang-k8s-apiextensions-apiserver-dev"
PACKAGES = Path(__file__).with_name("apiextensions-packages.txt")
"""The packages that the compiler reads: a tenth of the bytes of all that LIBRARY depends on."""
PROGRAMS = ("etcd", "apiextensions-apiserver")
VERSION_FILE = "apiextensions-apiserver.version"
"""Beside the programs, since the server does not tell its version on the command line."""


def build(workspace: Path, progress: Progress) -> Path:
    """Builds in an empty folder; returns the folder in it that holds PROGRAMS and VERSION_FILE."""
    apt = debian.Apt(_folder(workspace, "apt"), workspace / "build.log")
    apt.update(debian.archive_uri(), SUITE)
    made = _folder(workspace, "bin")
    try:
        _build(apt, PACKAGES.read_text().split(), _folder(workspace, "listed"), made, progress)
    except CommandFailedError:
        progress(f"the packages of {PACKAGES.name} do not suffice any more: taking all that {LIBRARY} depends on")
        needed = [name for name in apt.dependencies(LIBRARY, recursive=True) if re.fullmatch(r"golang-.*-dev", name)]
        _build(apt, [LIBRARY, *needed], _folder(workspace, "all"), made, progress)
    return made


def version_in(folder: Path) -> str:
    """The version of Kubernetes, such as v1.36.4, that the server of custom resources in ``folder`` is from."""
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
    """That of the Kubernetes release: the library of 1.36.4 is version 0.36.4."""
    (package,) = debs.glob(f"{LIBRARY}_*.deb")
    match = re.search(r"_0\.(\d+\.\d+)", package.name)
    assert match is not None, package
    return f"1.{match.group(1)}"


def _publish_openapi(source: Path) -> None:
    """Alone, the server has no OpenAPI of version 2, and then publishes no custom resources in version 3 either."""
    text, condition = source.read_text(), "if s.GenericAPIServer.StaticOpenAPISpec != nil {"
    if condition not in text:
        raise ClusterSupportError(f"{source} has no line '{condition}': the patch does not fit this source")
    source.write_text(text.replace(condition, "{"))


def _folder(workspace: Path, name: str) -> Path:
    folder = workspace / name
    folder.mkdir(parents=True)
    return folder
