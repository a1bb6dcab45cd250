#!/usr/bin/env bash
# The source distribution: exactly the tracked files, and a wheel builds from it in a clean folder with g++, Python and make (without CUDA).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git diff --quiet HEAD || { echo "sdist-test: the checkout has changes, expected a clean one" >&2; exit 2; }
"$python" -m uv build -q --sdist --no-build-isolation --python "$python" -o "$work/dist" . >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
sdist=$(ls "$work"/dist/*.tar.gz)
tar tzf "$sdist" | sed 's#^[^/]*/##' | grep -v '^PKG-INFO$' | sort >"$work/packed"
git ls-files | sort | diff - "$work/packed" || { echo "sdist-test: < tracked but not packed, > packed but not tracked" >&2; exit 1; }
echo "sdist-test: $(basename "$sdist"), $(wc -l <"$work/packed") files, $(stat -c %s "$sdist") bytes: exactly the tracked ones"

begin=$SECONDS
tar xzf "$sdist" -C "$work"
CMAKE_GENERATOR="Unix Makefiles" CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} "$python" -m uv build --wheel --no-build-isolation \
  --python "$python" -o "$work/wheel" -C cmake.define.NYBBLE_CUDA=OFF -C "cmake.define.NYBBLE_PYTHON=$python" \
  "$work"/nybble-*/ >"$work/wheel.log" 2>&1 || { tail -40 "$work/wheel.log"; exit 1; }
"$python" -m zipfile -e "$work"/wheel/*.whl "$work/installed"
cd "$work"
PYTHONPATH=$work/installed "$python" -c "
import nybble, torch
assert nybble.build_info()['library'].startswith('$work/installed'), nybble.build_info()
packed, state = nybble.quantize_4bit(torch.randn(64, 128), quant_type='nf4')
x = torch.randn(3, 128)
expected = x.double() @ nybble.dequantize_4bit(packed, state).double().t()
assert torch.allclose(nybble.linear(x, packed, state).double(), expected, atol=1e-4)
print('sdist-test:', nybble.build_info())
"
echo "sdist-test: a wheel built from it in $((SECONDS - begin)) s"
