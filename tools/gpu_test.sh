#!/usr/bin/env bash
# GPU tests from a build folder: every C++ test binary, then the Python tests. Usage: tools/gpu_test.sh PYTHON BUILD_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 build=$2
export NYBBLE_REQUIRE_GPU=1 NYBBLE_BUILD_DIR=$build PYTHONPATH=python
for binary in "$build"/tests/cpp/*/*_test; do
  echo "== $binary"
  "$binary" --gtest_brief=1
done
"$python" -m pytest -q --timeout=600 tests/python
