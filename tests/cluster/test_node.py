"""The node of the tests: its features, and complete removal in all cases."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_support import binaries
from cluster_support.cluster import wait_until
from cluster_support.errors import NotReadyError
from node_support import images
from node_support.leftovers import leftovers
from node_support.machine import PREFIX, make_cgroups
from node_support.prepared import Prepared

pytestmark = pytest.mark.timeout(300)

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "sleeper"},
    "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "sleeper", "image": images.PAUSE.name, "imagePullPolicy": "IfNotPresent"}],
    },
}
STARTER = """
    import pathlib, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.append(sys.argv[1])
    from cluster_support import binaries
    from node_support import images, tools
    from node_support.node import Node
    env = {"MEGATRON_CACHE_DIR": sys.argv[2]}
    programs = tools.find_or_fetch(env, print)
    node = Node(binaries.find(env, print), pathlib.Path(sys.argv[3]), pathlib.Path("node").absolute(), programs)
    with node:
        node.import_image(pathlib.Path(sys.argv[4]))
        namespace = node.make_namespace()
        node.kubectl("-n", namespace, "apply", "-f", "-", input=sys.argv[5])
        pod = f"/api/v1/namespaces/{namespace}/pods/sleeper"
        while node.request("GET", pod)["status"].get("phase") != "Running":
            time.sleep(0.2)
        pathlib.Path("pids").write_text(" ".join(map(str, node.processes())))
        time.sleep(600)
"""


def kill_starter(starter: subprocess.Popen[bytes]) -> None:
    starter.kill()


def interrupt_starter(starter: subprocess.Popen[bytes]) -> None:
    starter.send_signal(signal.SIGINT)


def content(archive: tarfile.TarFile, name: str) -> bytes:
    """A file of an archive."""
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def ended_pid() -> int:
    """The process id of an ended process, as in the names of the cgroups of a node that was killed."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_an_image_has_no_names_and_addresses_of_the_machine_that_built_it(prepared_node: Prepared) -> None:
    with tarfile.open(prepared_node.images / images.OPERATOR.archive) as archive:
        (manifest,) = json.loads(content(archive, "manifest.json"))
        with tarfile.open(fileobj=archive.extractfile(manifest["Layers"][0])) as base:
            names = [f"etc/{name}" for name in ("hostname", "resolv.conf", "apt/sources.list")]
            found = [content(base, name) for name in names]
            modes = [stat.S_IMODE(base.getmember(name).mode) for name in names]
    assert found == [b""] * len(names)
    assert modes == [0o644] * len(names)


@pytest.mark.parametrize("end", [kill_starter, interrupt_starter])
def test_nothing_of_a_node_is_left_when_the_process_that_started_it_ends(
    prepared_node: Prepared,
    tmp_path_factory: pytest.TempPathFactory,
    end: Callable[[subprocess.Popen[bytes]], None],
) -> None:
    forgotten = make_cgroups(f"{PREFIX}{ended_pid()}")
    folder = tmp_path_factory.mktemp("node")  # a folder with the name of this test would be too long for sockets
    before = leftovers(prepared_node.tools)
    (folder / "node").mkdir()
    cache = str(prepared_node.images.parent)
    kubectl = str(binaries.find_kubectl(os.environ))
    pause = str(prepared_node.images / images.PAUSE.archive)
    words = [str(Path(__file__).parent), cache, kubectl, pause, json.dumps(POD)]
    starter = subprocess.Popen([sys.executable, "-c", textwrap.dedent(STARTER), *words], cwd=folder)
    written = folder / "pids"
    wait_until(lambda: starter.poll() is not None or (written.exists() and bool(written.read_text())), "a pod", 150)
    pids = [int(pid) for pid in written.read_text().split()]
    assert len(pids) > 8
    assert leftovers(prepared_node.tools, before)
    assert not any(each.exists() for each in forgotten)
    end(starter)
    starter.wait(60)
    with contextlib.suppress(NotReadyError):  # The assertion names what is left.
        wait_until(lambda: not leftovers(prepared_node.tools, before), "nothing to be left", 60)
    assert leftovers(prepared_node.tools, before) == {}
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"the end of {pids}", 30)
    wait_until(lambda: not (folder / "node/scratch").exists(), "images and containers to be removed", 60)
