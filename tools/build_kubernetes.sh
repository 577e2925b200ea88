#!/bin/sh
# Builds a release of Kubernetes from its Go modules: build_kubernetes.sh MINOR FOLDER, such as 1.36 and a folder of the
# cache. The folder can then be used as KUBEBUILDER_ASSETS: etcd, kube-apiserver, kube-controller-manager,
# kube-scheduler, kubelet, kube-proxy. Requires Go and a Go module proxy (GOPROXY); fails with one line without them.
set -eu

minor=$1 folder=$2
programs="kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy"

complete() {
    for name in etcd $programs; do [ -x "$folder/$name" ] || return 1; done
}
fail() {
    echo "make: no Kubernetes $minor here: $1" >&2
    exit 1
}

case $minor in 1.[0-9]*) ;; *) fail "KUBERNETES=$minor is not a minor version; use the form 1.36" ;; esac
complete && exit
command -v go >/dev/null || fail "Go is not on PATH; install it, or set KUBEBUILDER_ASSETS to a folder with the programs"

mkdir -p "$(dirname "$folder")"
work=$(mktemp -d "$folder-building-XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
go mod init build >/dev/null 2>&1
latest() { # MODULE PREFIX: its newest release with this prefix
    go list -m -versions "$1" 2>"$work/error" | tr ' ' '\n' | grep "^$2" | grep -v -- - | tail -n 1
}
version=$(latest k8s.io/kubernetes "v$minor.")
[ -n "$version" ] || fail "the Go module proxy has no release of it: $(tail -n 1 "$work/error")"
echo "make: building Kubernetes $version into $folder (once; some ten minutes on 2 cores)"

# k8s.io/kubernetes requires its staging modules at v0.0.0: folders of its repository that are not in its module.
go mod edit -require "k8s.io/kubernetes@$version"
go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p' |
    xargs sed -n 's/^\t*\(k8s.io\/[a-z0-9.-]*\) v0\.0\.0.*/\1/p' |
    while read -r module; do go mod edit -replace "$module=$module@v0${version#v1}"; done
{
    # A main package can only be imported behind a build tag, which `go mod tidy` ignores.
    printf '//go:build tools\n\npackage build\n\n'
    for name in $programs; do printf 'import _ "k8s.io/kubernetes/cmd/%s"\n' "$name"; done
} >tools.go
go mod tidy -e >/dev/null 2>"$work/error" || fail "its modules do not resolve: $(tail -n 1 "$work/error")"

stamp="k8s.io/component-base/version"
flags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=1 -X $stamp.gitMinor=${minor#1.}"
mkdir bin
for name in $programs; do
    echo "make: compiling $name"
    CGO_ENABLED=0 go build -trimpath -ldflags "$flags" -o "bin/$name" "k8s.io/kubernetes/cmd/$name"
done
echo "make: compiling etcd"
(
    mkdir etcd && cd etcd && go mod init etcd >/dev/null 2>&1
    go get "go.etcd.io/etcd/server/v3@$(latest go.etcd.io/etcd/server/v3 v3.)"
    CGO_ENABLED=0 go build -trimpath -o ../bin/etcd go.etcd.io/etcd/server/v3
)
rm -rf "$folder"
mv bin "$folder"
complete || fail "the build is incomplete"
