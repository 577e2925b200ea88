#!/bin/sh
# Makes the virtual environment: make_venv.sh FOLDER. Python 3.11 or newer is needed, PYTHON names another than python3.
# Debian keeps the part of Python that makes virtual environments in a package of its own; root gets it by itself.
set -eu

folder=$1
python=${PYTHON:-python3}

command -v "$python" >/dev/null || {
    echo "make: no $python here: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)" >&2
    exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "make: $("$python" --version) is too old, 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "make: installing python3-venv, which Debian keeps apart from Python"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv >/dev/null
    else
        echo "make: $python cannot make virtual environments; once: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi
"$python" -m venv "$folder"
