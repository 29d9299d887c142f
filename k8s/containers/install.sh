#!/bin/sh
# Installs Paceline into a new virtual environment: the steps of both images, which also work without a container.
#
#   install.sh PREFIX SOURCE REQUIREMENTS...
#
# PREFIX        the environment to create
# SOURCE        a checkout
# REQUIREMENTS  all packages with hashes: requirements.txt, and requirements-cpu.txt or requirements-cuda.txt
#
# $PYTHON is the interpreter (python3.11). $PIP_ARGS are additional arguments of pip, such as `--extra-index-url URL`.
set -eu

if [ $# -lt 3 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
prefix=$1
source=$2
shift 2
for file in "$@"; do
    set -- "$@" -r "$file"
    shift
done

"${PYTHON:-python3.11}" -m venv "$prefix"
pip() {
    "$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"
}
# shellcheck disable=SC2086  # several words
pip install --require-hashes --only-binary :all: ${PIP_ARGS:-} "$@"
# Its build tools are among the packages installed with hashes, so nothing else is downloaded.
pip install --no-deps --no-build-isolation --no-index "$source"
pip check

# The server of both Redis roles, at a path that manifests can name.
server=$("$prefix/bin/python" -c 'from cache_service.store.embedded_server import find_server_binary as f; print(f())')
ln -sf "$server" "$prefix/bin/valkey-server"
