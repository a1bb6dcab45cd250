#!/usr/bin/env bash
# C++ tests under address and undefined-behaviour sanitizers, then the fuzz target of the safetensors reader (FUZZ_SECONDS, default 180).
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-180}
cmake --preset sanitize >build/sanitize.log
cmake --build --preset sanitize
ctest --preset sanitize --timeout 1200
cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DNYBBLE_CUDA=OFF -DNYBBLE_TORCH=OFF -DNYBBLE_TESTS=OFF -DNYBBLE_FUZZ=ON >>build/sanitize.log
cmake --build build/fuzz
found=$(mktemp -d)
build/fuzz/tests/fuzz/safetensors_fuzz -max_total_time="$seconds" -rss_limit_mb=2048 "$found" tests/fuzz/corpus
echo "sanitize: ok"
