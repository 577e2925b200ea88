"""The part of the pretended device in C++, without which PyTorch's CPU build refuses tensors on a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device_guard.cpp")


def load_device_guard(folder: Path) -> None:
    """Load the part in C++, which is compiled if the folder lacks it. Raises FileNotFoundError without a compiler."""
    library = folder / "device_guard.so"
    if not library.exists():
        home = Path(torch.__file__).parent
        command = ["c++", "-shared", "-fPIC", "-std=c++20", SOURCE, "-o", library, f"-I{home / 'include'}"]
        subprocess.run([*command, f"-L{home / 'lib'}", "-lc10"], check=True, capture_output=True)
    ctypes.CDLL(str(library))
