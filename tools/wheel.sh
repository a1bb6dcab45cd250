#!/usr/bin/env bash
# Builds dist/nybble-*-py3-none-manylinux_2_35_x86_64.whl with the CPU code and every CUDA target, then checks what it links and needs.
# NYBBLE_CUDA_TARGETS: fewer targets (the wheel then says so in nybble.build_info()).
set -euo pipefail
cd "$(dirname "$0")/.."
targets=${NYBBLE_CUDA_TARGETS:-75;80;86;89;90a;100;120}
platform=manylinux_2_35_x86_64
python=$PWD/.venv/bin/python
rm -rf build/dist
begin=$SECONDS
"$python" -m uv build --wheel --no-build-isolation --python "$python" -o build/dist \
  -C "cmake.define.NYBBLE_CUDA_TARGETS=$targets" -C "cmake.define.NYBBLE_CUDA=${NYBBLE_CUDA:-AUTO}" \
  -C "cmake.define.NYBBLE_PYTHON=$python" . >build/wheel.log 2>&1 || { tail -40 build/wheel.log; exit 1; }
echo "wheel: built in $((SECONDS - begin)) s; $(grep -o 'Nybble: .*CUDA.*' build/wheel.log | head -1)"
mkdir -p dist
PATH=$PWD/.venv/bin:$PATH .venv/bin/auditwheel repair --only-plat --plat "$platform" --exclude libtorch.so --exclude libtorch_cpu.so \
  -w dist build/dist/*.whl >>build/wheel.log 2>&1 || { tail -20 build/wheel.log; exit 1; }
"$python" tools/check_wheel.py dist/*"$platform".whl
