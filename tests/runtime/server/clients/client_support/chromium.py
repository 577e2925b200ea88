"""The browser for the tests: an installed Chromium, or Debian's package, unpacked into the cache folder."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster_support import debian
from cluster_support.cache import Kept, cache_folder, kept
from cluster_support.errors import CommandFailedError, NoClientError
from cluster_support.processes import run_guarded
from cluster_support.progress import Progress, Say

PROGRAM = "chromium"
REMEDY = "put chromium on PATH, or run `make clients` on a Debian with apt-get"
FLAGS = (
    "--no-sandbox",  # not possible as root in many containers; the tests open only our own pages
    "--disable-gpu",
    "--disable-quic",
)
LAUNCHER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH={libraries}
[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/root/usr/lib/chromium/chromium" "$@"
"""
FONTS = """<?xml version="1.0"?>
<fontconfig><dir prefix="relative">root/usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
"""


def find(env: Mapping[str, str]) -> Path:
    """A program with Chromium's flags. Raises NoClientError."""
    if installed := shutil.which(PROGRAM, path=env.get("PATH")):
        return Path(installed)
    folder = _folder(env)
    if not _runs(folder):
        raise NoClientError(f"there is no Chromium: {REMEDY}")
    return folder / PROGRAM


def find_or_fetch(env: Mapping[str, str], say: Say) -> Path:
    """The same; downloads it first if it is missing."""
    if installed := shutil.which(PROGRAM, path=env.get("PATH")):
        return Path(installed)
    return kept(Kept("Chromium", _folder(env), "120 MB or more to download", _runs, _fetch), say) / PROGRAM


def _folder(env: Mapping[str, str]) -> Path:
    return cache_folder(env) / "chromium"


def _runs(folder: Path) -> bool:
    """Whether it runs; False also if a required library has been removed from the machine."""
    program = folder / PROGRAM
    return program.exists() and subprocess.run([program, "--version"], capture_output=True).returncode == 0


def _fetch(workspace: Path, progress: Progress) -> Path:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NoClientError(f"there is no Chromium, and no apt-get to download it: {REMEDY}")
    log = workspace / "log"
    apt = debian.Apt(workspace / "apt", log)
    made = workspace / "made"
    made.mkdir()
    try:
        progress("reading the package lists")
        apt.update()
        progress("downloading Chromium with the libraries that this machine lacks")
        packages = apt.download_missing(PROGRAM)
        progress("unpacking")
        debian.unpack(packages, made / "root", log)
    except CommandFailedError as error:
        raise NoClientError(f"Chromium could not be downloaded: {REMEDY}\n{error}") from error
    _write_launcher(made)
    run_guarded([made / PROGRAM, "--version"], log)
    return made


def _write_launcher(made: Path) -> None:
    folders = sorted({path.parent.relative_to(made) for path in (made / "root").glob("**/lib*.so*")})
    launcher = made / PROGRAM
    launcher.write_text(LAUNCHER.format(libraries=":".join(f'"$here/{folder}"' for folder in folders)))
    launcher.chmod(0o755)
    (made / "fonts.conf").write_text(FONTS)
