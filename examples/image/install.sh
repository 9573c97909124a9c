#!/bin/sh
# Installs the source tree beside it into a bare Debian 12: the step of the Dockerfile, run by
# tests/image/bare_root.sh without a container engine.
#
#   sh install.sh [REQUIREMENT OF TORCH]
set -eu
cd "$(dirname "$0")/../.."
apt-get update
apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/tailrace
pip="/opt/tailrace/bin/pip --disable-pip-version-check --no-cache-dir"
$pip install --constraint constraints.txt "${1:-torch}"
$pip install --constraint constraints.txt ".[quickstart,serve,view,lora,datasets,math,ray]"
ln -s /opt/tailrace/bin/tailrace /opt/tailrace/bin/ray /usr/local/bin
