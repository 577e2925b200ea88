"""The part of Triton that a C compiler makes at the first launch of a kernel, as in the image for CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from triton.backends.nvidia import driver
from triton.runtime.build import _build

DOCKERFILE = Path(__file__).parents[3] / "runtime" / "Dockerfile"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_launcher_needs_no_more_than_a_compiler_and_the_headers_of_python_and_triton(tmp_path: Path) -> None:
    stub = ["gcc", "-x", "c", "-shared", "-fPIC", "-", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(stub, input="int stub;", text=True, check=True)
    source = tmp_path / "cuda_utils.c"
    source.write_text((Path(driver.dirname) / "driver.c").read_text())
    made = _build("cuda_utils", str(source), str(tmp_path), [str(tmp_path)], driver.include_dirs, driver.libraries, [])
    assert b"PyInit_cuda_utils" in Path(made).read_bytes()
    listed = subprocess.run(
        ["gcc", "-M", *(f"-I{each}" for each in (*driver.include_dirs, sysconfig.get_paths()["include"])), source],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    headers = {Path(path).name for path in re.findall(r"\S+\.h", listed)}
    assert {"Python.h", "cuda.h"} <= headers
    assert not any("torch" in path for path in re.findall(r"\S+\.h", listed)), "the image has no headers of PyTorch"


@pytest.mark.parametrize("package", ["gcc", "libc6-dev"])
def test_the_image_for_cuda_installs_the_compiler(package: str) -> None:
    (step,) = re.findall(r'RUN if \[ "\$DEVICE" = cuda \]; then(.*?)\n    fi', DOCKERFILE.read_text(), re.DOTALL)
    (installed,) = re.findall(r"apt-get install --yes --no-install-recommends (.*)\\", step)
    assert package in installed.split()
    assert "#include <Python.h>" in step, "the build fails without Python's headers"
