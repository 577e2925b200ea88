"""The launcher's metrics folder is removed, however the launcher ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_runtime.launch.metrics_folder import MetricsFolder

OWNER = """
import pathlib, sys, time
from megatron_runtime.launch.metrics_folder import MetricsFolder
folder = MetricsFolder(pathlib.Path(sys.argv[1]))
print(folder.path, flush=True)
time.sleep(600)
"""


def test_closing_removes_the_folder(tmp_path: Path) -> None:
    folder = MetricsFolder(tmp_path)
    (folder.path / "counter_1.db").touch()
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_removes_folders_of_killed_launchers_and_not_of_running_ones(tmp_path: Path) -> None:
    stranger = tmp_path / "megatron-metrics-without-a-lock"
    stranger.mkdir()
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        (theirs / "counter_1.db").touch()
        first = MetricsFolder(tmp_path)
        assert theirs.exists()
        owner.kill()
    assert theirs.exists()
    second = MetricsFolder(tmp_path)
    assert not theirs.exists()
    assert {first.path, second.path, stranger} == set(tmp_path.iterdir())
    first.close()
    second.close()
