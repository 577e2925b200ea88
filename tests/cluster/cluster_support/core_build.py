"""Builds the core of Kubernetes from Debian's source package: the programs of a control plane and of a node.

v1.20.2 in bookworm is the newest release whose source package contains the servers; later ones contain only kubectl.
The API server is patched: with CUSTOM_RESOURCES_PORT it leaves custom resources to a second server.
"""

import os
from pathlib import Path

from cluster_support import debian, go
from cluster_support.errors import ClusterSupportError
from cluster_support.go import Go
from cluster_support.processes import run_guarded
from cluster_support.progress import Progress

VERSION = "1.20.2"
SOURCE_VERSION = "1.20.5+really1.20.2-1.1+deb12u1"
COMPILED = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
PACKAGES = ("golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev")
CUSTOM_RESOURCES_PATCH = Path(__file__).with_name("custom-resources.patch")
TOOLS = ("patch", "xz-utils")
"""Packages of programs for the build that a minimal Debian lacks."""
OPENAPI_MARK = b"+k8s:openapi-gen="
OPENAPI_ROOTS = ("cmd", "pkg", "plugin", "vendor/k8s.io")
OPENAPI_SKIPPED = ("code-generator", "kube-openapi", "gengo", "testdata")


def build(workspace: Path, progress: Progress) -> Path:
    """Builds in an empty folder; returns its subfolder with COMPILED."""
    return _Build(workspace, progress).run()


class _Build:
    def __init__(self, workspace: Path, progress: Progress) -> None:
        self.workspace = workspace
        self.progress = progress
        self.log = workspace / "build.log"
        self.debs, self.root, self.source, self.bin = (
            self._folder(name) for name in ("debs", "root", "gopath/src/k8s.io/kubernetes", "bin")
        )
        # Module mode rejects the replaced reflect2.
        self._go = Go(self.root / "usr/lib/go-1.19", workspace / "gopath", workspace)

    def run(self) -> Path:
        self._fetch()
        self._unpack()
        self._patch()
        self._generate_openapi()
        self._compile()
        return self.bin

    def _folder(self, name: str) -> Path:
        folder = self.workspace / name
        folder.mkdir(parents=True)
        return folder

    def _fetch(self) -> None:
        apt = debian.Apt(self._folder("apt"), self.log)
        apt.update(debian.archive_uri())
        self.progress(f"downloading the source of Kubernetes {VERSION} and Go (about 100 MB)")
        apt.download_source("kubernetes", SOURCE_VERSION, self.debs)
        apt.download((*PACKAGES, *TOOLS), self.debs)

    def _unpack(self) -> None:
        self.progress("unpacking")
        debian.unpack(self.debs, self.root, self.log)
        (upstream,) = self.debs.glob("kubernetes_*.orig.tar.gz")
        (packaging,) = self.debs.glob("kubernetes_*.debian.tar.xz")
        run_guarded(["tar", "-xzf", upstream, "--strip-components=1", "-C", self.source], self.log)
        run_guarded(["tar", "-xJf", packaging, "-C", self.workspace], self.log, env=self._with_tools())

    def _patch(self) -> None:
        patches = self.workspace / "debian/patches"
        packaged = [patches / name for name in (patches / "series").read_text().split()]
        for patch in (*packaged, CUSTOM_RESOURCES_PATCH):
            command = [self.root / "usr/bin/patch", "-p1", "-s", "-i", patch]
            run_guarded(command, self.log, cwd=self.source)
        self._replace_reflect2()
        self._hasten_pod_deletion()

    def _replace_reflect2(self) -> None:
        """The vendored 1.0.1 crashes if compiled by Go 1.18 or later; Debian packages 1.0.2."""
        name = "github.com/modern-go/reflect2"
        vendored = self.source / "vendor" / name
        for old in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
            old.unlink()
        packaged = self.root / "usr/share/gocode/src" / name
        for new in [*packaged.glob("*.go"), *packaged.glob("*.s")]:
            new.rename(vendored / new.name)

    def _hasten_pod_deletion(self) -> None:
        """A kubelet loop of 10 s deletes pods, which is too slow for tests."""
        file = self.source / "pkg/kubelet/status/status_manager.go"
        text = file.read_text()
        slow, fast = (f"const syncPeriod = {seconds} * time.Second" for seconds in (10, 1))
        if slow not in text:
            raise ClusterSupportError(f"{file} has no line '{slow}': the patch of kubelet does not fit this source")
        file.write_text(text.replace(slow, fast))

    def _generate_openapi(self) -> None:
        """The source package lacks this generated file."""
        self.progress("generating the OpenAPI definitions")
        generator = self.workspace / "openapi-gen"
        self._go.build(self.source, self.progress, "-o", generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
        options = {
            "-i": ",".join(f"k8s.io/kubernetes/{folder}" for folder in self._openapi_folders()),
            "-p": "k8s.io/kubernetes/pkg/generated/openapi",
            "-O": "zz_generated.openapi",
            "-h": "vendor/k8s.io/code-generator/hack/boilerplate.go.txt",
            "-r": str(self.workspace / "violations.report"),
        }
        command = [str(generator), *(word for pair in options.items() for word in pair)]
        run_guarded(command, self.workspace / "openapi.log", cwd=self.source, env=self._go.environment)

    def _openapi_folders(self) -> list[str]:
        found = set()
        for top in OPENAPI_ROOTS:
            # vendor/k8s.io consists of links into staging/
            for folder, below, files in os.walk(self.source / top, followlinks=True):
                below[:] = [n for n in below if n not in OPENAPI_SKIPPED and not n.startswith(("_", "sample-"))]
                sources = [Path(folder, name) for name in files if name.endswith(".go")]
                if any(OPENAPI_MARK in source.read_bytes() for source in sources):
                    found.add(os.path.relpath(folder, self.source))
        return sorted(found)

    def _compile(self) -> None:
        self.progress(f"compiling {', '.join(COMPILED)} {VERSION} (about 8 minutes of processor time)")
        vendored = "k8s.io/kubernetes/vendor/k8s.io"
        packages = (f"{vendored}/component-base/version", f"{vendored}/client-go/pkg/version")
        targets = [f"./cmd/{name}" for name in COMPILED]
        stamps = go.version_flags(VERSION, *packages)
        self._go.build(
            self.source, self.progress, "-tags", "providerless,dockerless", stamps, "-o", f"{self.bin}/", *targets
        )

    def _with_tools(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.root / 'usr/bin'}:{os.environ['PATH']}"}
