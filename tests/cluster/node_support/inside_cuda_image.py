"""Checks the image of the runtime with CUDA from the inside, without a GPU. A check that fails ends the program.

`python3 inside_cuda_image.py MODEL`, a GGUF file of SmolLM2. `compile_ahead.py` is beside this file.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

SERVED = "http://127.0.0.1:8000"
CAPABILITY = 90


def check_libraries(_: str) -> str:
    """PyTorch is a build with CUDA, starts without a driver, and the folders of the image are read-only."""
    import torch

    assert torch.version.cuda is not None, torch.__version__
    assert not torch.cuda.is_available()
    assert not os.access(Path(torch.__file__).parent, os.W_OK)
    return f"PyTorch {torch.__version__} with CUDA {torch.version.cuda}"


def check_compiler(_: str) -> str:
    """What Triton compiles in C at its first launch; a stub has the place of the driver's library."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import _build

    with tempfile.TemporaryDirectory() as folder:
        stub = ["gcc", "-x", "c", "-shared", "-fPIC", "-", "-o", f"{folder}/libcuda.so.1"]
        subprocess.run(stub, input="int stub;", text=True, check=True)
        source = Path(folder, "cuda_utils.c")
        source.write_text((Path(driver.dirname) / "driver.c").read_text())
        made = _build("cuda_utils", str(source), folder, [folder], driver.include_dirs, driver.libraries, [])
        assert b"PyInit_cuda_utils" in Path(made).read_bytes()
    return "gcc compiles the launcher"


def check_kernels(_: str) -> str:
    """The kernels of attention, rows and sampling compile, and are kept in the folder that a pod has for them."""
    import compile_ahead

    started, count = time.monotonic(), 0
    for name, kernel, constants, pointers, options in compile_ahead.cases(CAPABILITY):
        made = compile_ahead.compiled(kernel, constants, pointers, options, CAPABILITY)
        assert made.asm["cubin"], name
        count += 1
    kept = list(Path.home().glob(".triton/cache/**/*.cubin"))
    assert len(kept) >= count, f"{len(kept)} of {count} kernels are in {Path.home()}/.triton"
    return f"{count} kernels for compute capability {CAPABILITY} in {time.monotonic() - started:.0f} s"


def check_absent_gpu(model: str) -> str:
    """An absent GPU is an error in words."""
    command = ["megatron-serve", "--check", "--model", model, "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "PyTorch finds no GPU; check nvidia-smi" in said, said
    assert "Traceback" not in said, said
    return "an absent GPU is an error in words"


def check_chat(model: str) -> str:
    """The image serves a model on the CPU."""
    command = ["megatron-serve", "--model", model, "--served-name", "smollm2", "--dtype", "float32"]
    with subprocess.Popen(command) as server:
        try:
            while not _is_ready():
                assert server.poll() is None, f"the server ended with {server.returncode}"
                time.sleep(0.5)
            question = {"role": "user", "content": "What is the capital of France?"}
            body = json.dumps({"model": "smollm2", "messages": [question], "temperature": 0}).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{SERVED}/v1/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=120) as response:
                answer = json.load(response)["choices"][0]["message"]["content"]
        finally:
            server.terminate()
    assert "Paris" in answer, answer
    assert server.returncode == 0, f"the server ended with {server.returncode}"
    return f"on the CPU it answers {answer!r}"


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{SERVED}/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


CHECKS: tuple[Callable[[str], str], ...] = (
    check_libraries,
    check_compiler,
    check_kernels,
    check_absent_gpu,
    check_chat,
)


def main() -> None:
    (model,) = sys.argv[1:]
    for check in CHECKS:
        print(f"{check.__name__}: {check(model)}", flush=True)


if __name__ == "__main__":
    main()
