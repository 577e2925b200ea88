"""Pod manifests that run as processes, without a kubelet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from planning_support.process_pods import WEB, pod, until, web_pod

from megatron_operator.local import addresses
from megatron_operator.local.pod_manifest import PathMap, PodError
from megatron_operator.local.pods import ProcessPods
from megatron_operator.local.processes import is_running
from megatron_operator.observed_state import PodPhase

STUBBORN_PARENT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[ProcessPods]:
    secrets = {("default", "keys"): {"token": "hidden"}}
    running = ProcessPods(tmp_path, read_secret=lambda namespace, name: secrets[namespace, name])
    yield running
    await running.close(grace_seconds=0)


async def test_exit_code_zero_gives_phase_succeeded(pods: ProcessPods) -> None:
    pods.start(pod("print('done')"))
    await until(lambda: pods.status("dummy").finished, "the end")
    status = pods.status("dummy")
    assert (status.phase, status.exit_code, status.reason) == (PodPhase.SUCCEEDED, 0, "Completed")
    assert status.log.read_text() == "done\n"


async def test_a_failed_command_reports_its_exit_code_and_the_end_of_its_log(pods: ProcessPods) -> None:
    pods.start(pod("import sys; print('no such model'); sys.exit(2)"))
    await until(lambda: pods.status("dummy").finished, "the end")
    status = pods.status("dummy")
    assert (status.phase, status.exit_code, status.reason) == (PodPhase.FAILED, 2, "Error")
    assert "no such model" in status.message


async def test_the_termination_message_is_read_from_the_path_in_the_manifest(pods: ProcessPods) -> None:
    code = "import os, sys; open(os.environ['LOG'], 'w').write('weights are cut off'); sys.exit(1)"
    env = [{"name": "LOG", "value": "/dev/termination-log"}]
    pods.start(pod(code, env=env, terminationMessagePath="/dev/termination-log"))
    await until(lambda: pods.status("dummy").finished, "the end")
    assert pods.status("dummy").message == "weights are cut off"


async def test_a_killed_process_has_exit_code_128_plus_the_signal(pods: ProcessPods) -> None:
    pods.start(pod("import time; time.sleep(600)"))
    pid = await until(lambda: pods.status("dummy").pid, "a pid")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pods.status("dummy").finished, "the end")
    assert pods.status("dummy").exit_code == 137


async def test_the_process_id_of_an_ended_pod_gets_no_signal(
    pods: ProcessPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be that of another process by then."""
    pods.start(pod("pass"))
    await until(lambda: pods.status("dummy").finished, "the end")
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *sent: signals.append(sent))
    pods.kill()
    assert signals == []


async def test_variables_take_values_secret_keys_and_fields_of_the_pod(pods: ProcessPods) -> None:
    env = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "BOTH", "value": "$(NAME)-$(TOKEN)-$(NOBODY)-$$(NAME)"},
    ]
    code = "import os, json, sys; print(json.dumps([os.environ['APP'], os.environ['BOTH'], sys.argv[1]]))"
    pods.start(pod(code, env=env, args=["--name=$(NAME)"]))
    status = await until(lambda: (s := pods.status("dummy")).finished and s, "the end")
    assert json.loads(status.log.read_text()) == ["dummy", "dummy-hidden-$(NOBODY)-$(NAME)", "--name=dummy"]


async def test_a_missing_secret_key_is_rejected_with_a_message(pods: ProcessPods) -> None:
    env = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "tokn"}}}]
    with pytest.raises(PodError, match=r"Secret 'keys' has no key 'tokn'; it has: token"):
        pods.start(pod("pass", env=env))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"restartPolicy": "Always"}, "spec.restartPolicy: Always"),
        ({"initContainers": [{"name": "fetch"}]}, "spec.initContainers: fetch"),
        ({"containers": []}, "spec.containers: empty"),
        ({"containers": [{"name": "main", "command": ["no-such-program"]}]}, "no-such-program: no such program"),
    ],
)
async def test_a_manifest_that_can_not_run_as_a_process_is_rejected(
    pods: ProcessPods, change: dict[str, Any], words: str
) -> None:
    manifest = pod("pass")
    manifest["spec"].update(change)
    with pytest.raises(PodError, match=words):
        pods.start(manifest)
    assert pods.statuses() == []


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"volumeMounts": [{"mountPath": "/x"}]}, r"volumeMounts\[0\]\.name: missing beside mountPath; .* add it"),
        ({"volumeMounts": ["/x"]}, r"volumeMounts\[0\]: '/x' is not an object; write one that has the field mountPath"),
        ({"volumeMounts": [{"name": "host", "mountPath": "/x"}]}, r"spec\.volumes\[0\]\.hostPath\.path: missing"),
        ({"volumeMounts": [{"name": "keys", "mountPath": "/x"}]}, r"spec\.volumes\[1\]\.secret\.items\[0\]\.path: "),
        ({"env": [{"value": "1"}]}, r"spec\.containers\[0\]\.env\[0\]\.name: missing beside value"),
        ({"env": [{"name": "X", "valueFrom": {"fieldRef": {}}}]}, r"env X: valueFrom\.fieldRef\.fieldPath: missing"),
        (
            {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "keys", "optional": True}}}]},
            r"env X: valueFrom\.secretKeyRef\.key: missing beside name, optional; a pod needs it, add it",
        ),
        ({"ports": [{"containerPort": "http"}]}, r"ports\[0\]\.containerPort: 'http' is not a number; write one"),
        ({"readinessProbe": {"httpGet": {"path": "/"}}}, r"readinessProbe\.httpGet\.port: missing beside path"),
        (
            {"startupProbe": {"httpGet": {"port": 1}, "periodSeconds": "2s"}},
            r"startupProbe\.periodSeconds: '2s' is not a number",
        ),
    ],
)
async def test_a_missing_or_invalid_field_is_reported_with_its_value(
    pods: ProcessPods, container: dict[str, Any], words: str
) -> None:
    manifest = pod("pass", **container)
    manifest["spec"]["volumes"] = [
        {"name": "host", "hostPath": {}},
        {"name": "keys", "secret": {"secretName": "keys", "items": [{"key": "token"}]}},
    ]
    with pytest.raises(PodError, match=words):
        pods.start(manifest)
    assert pods.statuses() == []


async def test_container_paths_are_mapped_to_local_paths(tmp_path: Path) -> None:
    mapped = ProcessPods(tmp_path / "pods", paths=PathMap().plus("/models", tmp_path / "here"))
    pods_code = "import sys; print(sys.argv[1:])"
    adapter = "--lora-modules=sql=/models/sql"
    mapped.start(pod(pods_code, args=["--model", "/models/a.gguf", "--path=/models", "/modelsx", adapter]))
    status = await until(lambda: (s := mapped.status("dummy")).finished and s, "the end")
    here = tmp_path / "here"
    words = ["--model", f"{here}/a.gguf", f"--path={here}", "/modelsx", f"--lora-modules=sql={here}/sql"]
    assert status.log.read_text().strip() == str(words)
    await mapped.close()


async def test_a_claimed_volume_needs_a_mapped_path(pods: ProcessPods) -> None:
    manifest = pod("pass", volumeMounts=[{"name": "model", "mountPath": "/model"}])
    manifest["spec"]["volumes"] = [{"name": "model", "persistentVolumeClaim": {"claimName": "m"}}]
    with pytest.raises(PodError, match="--map-path /model=FOLDER"):
        pods.start(manifest)


async def test_a_pod_is_ready_when_its_probe_answers_and_unready_when_it_stops(
    pods: ProcessPods, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    pods.start(web_pod("web", ready_file))
    await until(lambda: pods.status("web").phase is PodPhase.RUNNING, "running")
    assert not pods.status("web").ready
    ready_file.touch()
    await until(lambda: pods.status("web").ready, "readiness")
    ready_file.unlink()
    await until(lambda: not pods.status("web").ready, "unreadiness")


async def test_two_pods_listen_on_the_same_port_at_different_addresses(pods: ProcessPods, tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    addresses = {pods.start(web_pod(name, tmp_path / "ready")).address for name in ("one", "two")}
    await until(lambda: all(status.ready for status in pods.statuses()), "readiness of both")
    assert len(addresses) == 2
    assert all(address.startswith("127.") for address in addresses)


async def test_a_pod_that_never_becomes_ready_fails_with_its_startup_probe(pods: ProcessPods) -> None:
    probe = {"httpGet": {"path": "/healthz", "port": 8000}, "periodSeconds": 0.1, "failureThreshold": 2}
    pods.start(pod("import time; time.sleep(600)", startupProbe=probe))
    status = await until(lambda: (s := pods.status("dummy")).finished and s, "the end")
    assert (status.phase, status.reason) == (PodPhase.FAILED, "Unhealthy")
    assert "/healthz on port 8000" in status.message


async def test_a_pod_that_fails_its_liveness_probe_is_ended(pods: ProcessPods, tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    probe = {"httpGet": {"path": "/readyz", "port": 8000}, "periodSeconds": 0.1, "failureThreshold": 2}
    pods.start(web_pod("web", tmp_path / "ready", livenessProbe={**probe, "initialDelaySeconds": 1}))
    await until(lambda: pods.status("web").ready, "readiness")
    (tmp_path / "ready").unlink()
    status = await until(lambda: (s := pods.status("web")).finished and s, "the end")
    assert status.reason == "Unhealthy"


async def test_stop_waits_for_the_grace_period(pods: ProcessPods) -> None:
    code = """
import signal, sys, time
def bye(*_):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
print("up", flush=True)
time.sleep(600)
"""
    log = pods.start(pod(code)).log
    await until(lambda: log.exists() and log.read_text() == "up\n", "start")
    await pods.stop("dummy")
    assert log.read_text() == "up\ndrained\n"
    assert pods.statuses() == []


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(pods: ProcessPods) -> None:
    log = pods.start(pod(STUBBORN_PARENT)).log
    child = int(await until(lambda: log.exists() and log.read_text().strip(), "the child's pid"))
    assert is_running(child)
    await pods.stop("dummy", grace_seconds=0.2)
    assert not is_running(child)


async def test_a_second_stop_can_shorten_the_grace_period(pods: ProcessPods) -> None:
    log = pods.start(pod(STUBBORN_PARENT)).log
    await until(lambda: log.exists() and log.read_text().strip(), "the child's pid")
    slow = asyncio.create_task(pods.stop("dummy", grace_seconds=600))
    await until(lambda: pods.status("dummy").deleting, "the first stop")
    await pods.stop("dummy", grace_seconds=0)
    await slow
    assert pods.statuses() == []


async def test_children_of_an_ended_process_are_killed(pods: ProcessPods) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    pods.start(pod(code))
    status = await until(lambda: (s := pods.status("dummy")).finished and s, "the end")
    assert not is_running(int(status.log.read_text()))


async def test_a_service_forwards_to_the_ready_pod_and_keeps_its_address(pods: ProcessPods, tmp_path: Path) -> None:
    address = await pods.network.apply_service(WEB)
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://{address}:8000/")
        (tmp_path / "ready").touch()
        for name in ("first", "second"):
            pods.start(web_pod(name, tmp_path / "ready"))
            await until(lambda name=name: pods.status(name).ready, "readiness")
            assert (await client.get(f"http://{address}:8000/", headers={"Connection": "close"})).text == name
            await pods.stop(name)
    assert await pods.network.apply_service(WEB) == address


async def test_a_service_that_is_applied_concurrently_has_one_address(pods: ProcessPods) -> None:
    addresses = await asyncio.gather(*(pods.network.apply_service(WEB) for _ in range(3)))
    assert set(addresses) == {pods.network.service_address("default", "web")}


async def test_open_connections_end_without_log_messages(
    pods: ProcessPods, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ready").touch()
    pods.start(web_pod("first", tmp_path / "ready"))
    await until(lambda: pods.status("first").ready, "readiness")
    address = await pods.network.apply_service(WEB)
    reader, writer = await asyncio.open_connection(address, 8000)
    await until(lambda: pods.network._connections, "the connection to be taken")
    await pods.network.close()
    assert await reader.read() == b""
    writer.close()
    assert caplog.records == []


async def test_names_of_services_and_pods_are_resolved(pods: ProcessPods) -> None:
    service = {"metadata": {"name": "chat", "namespace": "n"}, "spec": {"clusterIP": "None", "ports": [{"port": 5557}]}}
    address = await pods.network.apply_service(service)
    resolve = pods.network.resolve
    assert resolve("tcp://chat.n.svc:5557") == f"tcp://{address}:5557"
    assert resolve("chat.n.svc.cluster.local") == address
    assert resolve("chat") == "chat"
    assert resolve("http://other.n.svc:1/") == "http://other.n.svc:1/"
    peer = resolve("chat-0.chat.n.svc")
    assert peer.startswith("127.")
    assert peer != address
    manifest = pod("import time; time.sleep(600)", "chat-0")
    manifest["metadata"]["namespace"] = "n"
    manifest["spec"]["subdomain"] = "chat"
    assert pods.start(manifest).address == peer
    await pods.stop("chat-0", 0, namespace="n")


def test_a_port_that_is_taken_on_all_addresses_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_first_busy_port", lambda _address, ports: next(iter(ports)))
    with pytest.raises(addresses.NoAddressError, match=r"port 8000 is taken .* end it"):
        addresses.LoopbackAddresses().take([8000])


def test_no_process_survives_a_killed_owner(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib, sys
from megatron_operator.local.pods import ProcessPods
async def main():
    pods = ProcessPods(pathlib.Path({str(tmp_path)!r}))
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    pods.start({{"metadata": {{"name": "p"}},
                 "spec": {{"restartPolicy": "Never", "containers": [{{"name": "c", "command": command}}]}}}})
    while not pods.status("p").pid:
        await asyncio.sleep(0.01)
    print(pods.status("p").pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
    asyncio.run(until(lambda: not is_running(pid), "the end of the pod's process"))
