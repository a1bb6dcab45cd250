#!/usr/bin/env bash
# Formatting, Python lint and house rules. Usage: tools/lint.sh PYTHON [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
mapfile -t cpp < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
if [ "${2:-}" = --fix ]; then
  clang-format -i "${cpp[@]}"
  "$python" -m ruff check --fix .
  "$python" -m ruff format .
else
  clang-format --dry-run -Werror "${cpp[@]}"
  "$python" -m ruff check .
  "$python" -m ruff format --check .
fi
"$python" benchmarks/harness/figures.py
"$python" tools/check_style.py
echo "lint: ok"
