"""The distribution of tests to workers."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent
CONFTEST = f"""
    import sys
    sys.path.append({str(TESTS)!r})
    from suite_support.schedule import FileScheduling, longest_first

    def pytest_collection_modifyitems(items):
        items[:] = longest_first(items)

    def pytest_xdist_make_scheduler(config, log):
        return FileScheduling(config, log)
"""
RECORD = """
    import os, pathlib
    def test_nothing():
        with pathlib.Path(os.environ["PYTEST_XDIST_WORKER"]).open("a") as order:
            print(pathlib.Path(__file__).stem, file=order)
"""
FLAGS = ("-pxdist", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "--import-mode=importlib")


def test_the_first_worker_begins_with_the_cluster_and_then_takes_other_files(tmp_path: Path) -> None:
    for name in ("cluster/test_a", "runtime/server/test_b", "runtime/server/test_c", "runtime/test_d"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(RECORD))
    (tmp_path / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", *FLAGS, "tests"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    order = {worker: (tmp_path / worker).read_text().split() for worker in ("gw0", "gw1")}
    assert {worker: files[0] for worker, files in order.items()} == {"gw0": "test_a", "gw1": "test_b"}
    assert sorted(order["gw0"][1:] + order["gw1"][1:]) == ["test_c", "test_d"]
    assert len(order["gw0"]) == 2
