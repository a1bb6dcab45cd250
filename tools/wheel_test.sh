#!/usr/bin/env bash
# Installs dist/*.whl into clean environments, one torch version after the other, and runs there what a user would: the op tests, the aliasing gate,
# ten steps of training, `nybble doctor`, an import that is quick and silent, and an uninstall that leaves nothing.
# TORCH_VERSIONS: which torch releases (default: the oldest supported, the one we build with, the newest on the index).
# PYTEST_WORKERS: pytest's processes. WHEEL_TESTS: fewer tests than all. TORCH_INDEX: an index with torch's CPU builds, if torch's CUDA builds are too large to download.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls dist/nybble-*-manylinux_*.whl 2>/dev/null | tail -1) || true
[ -n "$wheel" ] || { echo "wheel-test: no wheel in dist/, run make wheel first" >&2; exit 2; }
tools/setup.sh python
uv="$PWD/.venv/bin/python -m uv"
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -vE '^(torch|triton|nvidia-|cuda-)' requirements/dev.txt >"$work/others.txt"
for version in ${TORCH_VERSIONS:-2.10.0 2.11.0 newest}; do
  begin=$SECONDS
  environment=$work/torch-$version
  torch=torch==$version
  [ "$version" = newest ] && torch=torch
  $uv venv -q "$environment"
  $uv pip install --python "$environment/bin/python" -q ${TORCH_INDEX:+--index "$TORCH_INDEX"} "$torch" -r "$work/others.txt"
  $uv pip install --python "$environment/bin/python" -q --no-deps "$wheel"
  cp -r --parents tests docs benchmarks src/device/fault.h "$work/" # some tests read pages, records and the names of the faults
  (
    cd "$work" # not the checkout: the installed package must be what is imported
    unset NYBBLE_BUILD_DIR PYTHONPATH
    export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 NYBBLE_COMMAND=$environment/bin/nybble
    python=$environment/bin/python
    "$python" "$root/tools/check_import.py"
    "$environment/bin/nybble" doctor
    "$python" -m pytest -q ${PYTEST_WORKERS:--n 2} --timeout=600 -p no:cacheprovider \
      ${WHEEL_TESTS:-tests/python --ignore=tests/python/demo --ignore=tests/python/benchmarks}
    "$python" -m nybble.gate aliasing
  )
  $uv pip uninstall -q --python "$environment/bin/python" nybble
  left=$(find "$environment" -iname '*nybble*' | head)
  [ -z "$left" ] || { echo "wheel-test: left behind: $left" >&2; exit 1; }
  echo "wheel-test: torch $("$environment/bin/python" -c 'import torch; print(torch.__version__)'): ok in $((SECONDS - begin)) s"
  rm -rf "$environment" "$work"/{tests,docs,benchmarks,src}
done
