#!/bin/sh
# Creates the virtual environment: make_venv.sh FOLDER. Requires Python 3.11 or newer; PYTHON overrides python3. On
# Debian, venv is a separate package, which is installed automatically as root.
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
        echo "make: installing python3-venv, a separate package on Debian"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv >/dev/null
    else
        echo "make: $python cannot create virtual environments; run once: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi
"$python" -m venv "$folder"
