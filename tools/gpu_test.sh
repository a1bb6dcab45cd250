#!/usr/bin/env bash
# GPU tests from a build folder: every C++ test binary, the Python tests with the GPU, the aliasing gate on it, then the tests of parts that are
# CPU code (the store) with the GPU hidden. Usage: tools/gpu_test.sh PYTHON BUILD_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 build=$2
export NYBBLE_BUILD_DIR=$build PYTHONPATH=python:${PYTHONPATH:-} HF_HUB_OFFLINE=1
cpu_only=(tests/python/cli)
export NYBBLE_REQUIRE_GPU=1
for binary in "$build"/tests/cpp/*/*_test; do
  echo "== $binary"
  "$binary" --gtest_brief=1
done
"$python" -m pytest -q --timeout=600 tests/python "${cpu_only[@]/#/--ignore=}"
"$python" benchmarks/harness/aliasing.py --device cuda
CUDA_VISIBLE_DEVICES='' NYBBLE_REQUIRE_GPU=0 "$python" -m pytest -q --timeout=600 "${cpu_only[@]}"
