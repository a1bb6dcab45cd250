import importlib.util
import pathlib

PATH = pathlib.Path(__file__).parents[3] / "benchmarks" / "harness" / "kernel_resources.py"
spec = importlib.util.spec_from_file_location("kernel_resources", PATH)
kernel_resources = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel_resources)


def listing(inside, name="_Z4loopv"):
    """SASS of a kernel whose loop has 20 mma and the given instructions; before it lies a spill that is allowed."""
    lines = ["STL [R1], R2", *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 20, *inside, "@P0 BRA 0x10", "EXIT"]
    body = "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))
    return f"\n\t\tFunction : {name}\n{body}\n"


def rows(sass, names=("_Z4loopv",)):
    resources = {name: dict(registers=1, spill_bytes=8) for name in names}
    return kernel_resources.rows_of("90", resources, sass)


def test_a_spill_inside_the_loop_is_counted_and_one_outside_is_not():
    assert rows(listing(["IADD3 R1, R2, R3, RZ"]))[0]["local_in_loops"] == 0
    found = rows(listing(["LDL R5, [R1+0x8]", "STL [R1+0x8], R5"]))[0]
    assert found["local_in_loops"] == 2 and found["loops"][0]["HMMA"] == 20


def test_a_loop_that_only_waits_is_none_of_the_kernels_own():
    wait = "\n\t\tFunction : _Z4waitv\n" + "\n".join(
        f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(["LDL R1, [R2]", "@P0 BRA 0x0"])
    )
    assert rows(wait, ["_Z4waitv"])[0]["loops"] == []


def test_usage_and_table_name_kernel_registers_and_stack():
    text = " Function _Z4loopv:\n  REG:40 STACK:16 SHARED:1088 LOCAL:0 CONSTANT[0]:600\n"
    usage = kernel_resources.read_usage(text)
    assert usage == {"_Z4loopv": dict(registers=40, spill_bytes=16, static_shared=1088)}
    found = kernel_resources.rows_of("90", usage, listing(["LDL R5, [R1+0x8]"]))
    table = kernel_resources.markdown(found, ["80", "90"], "title")
    assert "| `loop` | - | 40 (16), 22 ! |" in table
