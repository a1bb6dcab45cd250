"""A warp that lets TMA refill what it has read must have it in registers: checked in the compiler's output."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("sass_order", ROOT / "benchmarks" / "harness" / "sass_order.py")
sass_order = importlib.util.module_from_spec(spec)
sys.modules["sass_order"] = sass_order
spec.loader.exec_module(sass_order)

LOAD, USE, REFILL = "LDS.128 R4, [R0]", "LOP3.LUT R9, R8, R6, R5, 0x96, !PT", "UTMALDG.2D [UR4], [UR6]"


def found(*lines):
    body = "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))
    return sass_order.check(f"\n\t\tFunction : kernel\n{body}\n", "kernel")


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD, USE, REFILL, "EXIT"),
        (LOAD, "@P0 BRA 0x30", USE, "IADD3 R7, R7, 0x1, RZ", REFILL, "EXIT"),
        (REFILL, LOAD, "@P0 STS.64 [R2], R6", "@P1 BRA 0x0", "EXIT"),
        ("LDS R4, [R0]", "R2UR UR4, R4", REFILL, "EXIT"),
        (LOAD, "@!P0 BRA 0x40", USE, REFILL, "EXIT"),
    ],
)
def test_a_load_that_has_arrived_on_every_path_is_right(lines):
    assert found(*lines) == (1, [])


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD, REFILL, USE, "EXIT"),
        (LOAD, "IADD3 R8, R9, R10, RZ", REFILL, "EXIT"),  # R8 is not of the load: R4 .. R7
        (LOAD, "@P0 BRA 0x30", USE, REFILL, "EXIT"),  # one path of two
        (REFILL, LOAD, "@P1 BRA 0x0", USE, "EXIT"),  # round the loop
        ("LDSM.16.MT88.4 R4, [R0]", REFILL, "EXIT"),
        (LOAD, "@!UP0 UBLKCP.S.G [UR4], [UR6], UR8", USE, "EXIT"),
    ],
)
def test_a_load_under_way_on_some_path_is_found(lines):
    seen, wrong = found(*lines)
    assert seen == 1 and len(wrong) == 1 and "may be under way" in wrong[0]


def tool(name):
    packages = ["nvidia/cu13/bin", "triton/backends/nvidia/bin"]
    places = ["/usr/local/cuda/bin"] + [f"{path}/{package}" for path in sys.path for package in packages]
    path = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    if path is None:
        pytest.skip(f"no {name} on PATH, in /usr/local/cuda/bin or in a Python package")
    return path


# The refill behind the use of what was read, or in front of it.
KERNEL = """
#include "device/async.cuh"
using namespace nybble::device;
__global__ void refill(const __grid_constant__ CUtensorMap map, uint4* out) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t buffer = smem_address(shared);
  const uint4 read = load_shared_u128(buffer + threadIdx.x * 16);
  if (!FIRST) out[threadIdx.x] = read;
  if (threadIdx.x == 0) tma_load(buffer, &map, buffer + 4096, 0, 0);
  if (FIRST) out[threadIdx.x] = read;
}
"""


@pytest.mark.parametrize("refill_first", [False, True])
def test_a_compiled_kernel_that_refills_first_is_found(refill_first, tmp_path):
    nvcc, cuobjdump = tool("nvcc"), tool("cuobjdump")
    source, cubin = tmp_path / "refill.cu", tmp_path / "refill.cubin"
    source.write_text(KERNEL.replace("FIRST", str(int(refill_first))))
    options = ["-std=c++20", f"-I{ROOT / 'src'}", "-cubin", "-gencode=arch=compute_90a,code=sm_90a"]
    subprocess.run([nvcc, *options, "-o", str(cubin), str(source)], check=True)
    assert main(cubin, "refill", cuobjdump) == int(refill_first)


def main(file, part, cuobjdump):
    script = [sys.executable, sass_order.__file__, str(file), "--kernels", part, "--cuobjdump", cuobjdump]
    return subprocess.run(script).returncode


def test_the_hopper_kernels_refill_only_what_has_arrived():
    build = pathlib.Path(os.environ.get("NYBBLE_BUILD_DIR", ROOT / "build" / "dev"))
    library = build / "binding" / "libnybble_torch.so"
    cuobjdump = tool("cuobjdump")
    if not library.exists() or b"hopper8multiply" not in library.read_bytes():
        pytest.skip(f"no library with sm_90a kernels at {library}")
    assert main(library, "hopper8multiply", cuobjdump) == 0
    assert main(library, "no_such_kernel", cuobjdump) == 1
