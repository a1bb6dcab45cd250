#!/usr/bin/env bash
# GPU tests from a build folder, in this order: every C++ test binary (one that was not built fails), 10,000 random multiplies, the Python
# tests with the GPU, the gates, the portable kernels against float64 and the weights that every kernel multiplies by. Left out: the command's
# tests, which have no GPU part and are `make test`'s. Beside them the registers and spills of the kernels for this card, from the compiler. A
# table last: what ran, what did not and why.
# Usage: tools/gpu_test.sh PYTHON BUILD_DIR
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=$1 build=$2
export NYBBLE_BUILD_DIR=$build PYTHONPATH=python:${PYTHONPATH:-} HF_HUB_OFFLINE=1 NYBBLE_REQUIRE_GPU=1
cpu_only=(tests/python/cli)
failed=0 rows=()

# name, then a command
stage() {
  local name=$1 start=$SECONDS code=0
  shift
  echo "== $name"
  "$@" || code=$?
  [ "$code" -eq 0 ] || failed=1
  rows+=("$(printf '%-22s %-8s %4d s' "$name" "$([ "$code" -eq 0 ] && echo ok || echo "exit $code")" $((SECONDS - start)))")
}
not_run() { rows+=("$(printf '%-22s %-8s %s' "$1" "not run" "$2")"); }
has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }

workers=()
has xdist && workers=(-n "$(($(nproc) < 16 ? 4 : 8))")
resources="" capability=""
if command -v nvcc >/dev/null && command -v cuobjdump >/dev/null; then
  capability=$("$python" -c "import torch; print(*torch.cuda.get_device_capability(), sep='')")
  "$python" benchmarks/harness/kernel_resources.py src/linear/portable_bf16.cu src/linear/row_bf16.cu --targets "$capability" >"$build/kernel_resources.log" 2>&1 &
  resources=$!
fi
# By the sources: a binary that was not built is a failure, not one test less.
binaries=$("$python" tools/cpp_tests.py)
if [ -z "$binaries" ]; then
  not_run "C++ tests" "tools/cpp_tests.py names none"
  failed=1
fi
for binary in $binaries; do
  stage "${binary#*/}" "$build/tests/cpp/$binary" --gtest_brief=1
done
if [ -x "$build/tests/cpp/stress/linear_stress" ]; then
  stage stress "$build/tests/cpp/stress/linear_stress" --cases 10000
else
  not_run stress "no linear_stress in $build"
fi
# The gates about right and wrong: 80 s on an H200, alone on the card. share and speed are about time, which may have no verdict on a card that
# other work heats; `python -m nybble.gate all` runs them too. The test that is left out before is the aliasing gate with two runs of every arm,
# as it runs here, alone.
same=tests/python/gate/test_aliasing.py::test_every_cell_is_as_predicted_on_the_gpu
stage python "$python" -m pytest -q --timeout=600 "${workers[@]}" tests/python "${cpu_only[@]/#/--ignore=}" --deselect "$same"
stage gates "$python" -m nybble.gate all --device cuda --only numerics,determinism,memory,equality,exact,race
stage aliasing "$python" -m nybble.gate aliasing --device cuda --repeats 2
if [ -e "$build/benchmarks/cuda/libportable_bench.so" ]; then
  stage portable_check "$python" benchmarks/harness/portable_check.py "$build/benchmarks/cuda/libportable_bench.so" --seconds 20
else
  not_run portable_check "no libportable_bench.so in $build; cmake --build BUILD --target portable_bench"
fi
if [ -n "$resources" ]; then
  stage "kernel_resources sm_$capability" wait "$resources"
  tail -n 3 "$build/kernel_resources.log"
else
  not_run kernel_resources "no nvcc and cuobjdump on PATH"
fi
echo
printf '%s\n' "${rows[@]}"
exit $failed
