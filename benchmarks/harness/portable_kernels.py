"""The library built from benchmarks/cuda/portable_bench.cu, and random 4-bit weights to give it."""

import ctypes

import torch

INT, LONG, POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
NAMES = "path variant cut repeat direction dtype quant_type block_size sm sm_count"
POINTERS = "x packed absmax codes nested_absmax nested_code offset bias out workspace stream"
AUTO, PORTABLE, ROW, DENSE, HOPPER, SMALL_M, DEQUANTIZE = range(7)  # DEQUANTIZE: out is W[n][k], no plan
TILES = {0: "256", 1: "128", 2: "64", 3: "16"}  # portable variants
GENERAL = 4
NF4 = [0xBF800000, 0xBF3239B1, 0xBF066B30, 0xBECA32A0, 0xBE91A24D, 0xBE3D353F, 0xBDBA7871, 0x00000000]
NF4 += [0x3DA2FAFF, 0x3E24CAE3, 0x3E7C04DD, 0x3EAD033A, 0x3EE1A4B8, 0x3F1007AB, 0x3F3913B3, 0x3F800000]
FP4 = [0x00000000, 0x3BAAAAAB, 0x3F2AAAAB, 0x3F800000, 0x3EAAAAAB, 0x3F000000, 0x3E2AAAAB, 0x3E800000]
FP4 += [word | 0x80000000 for word in FP4]


class BenchCall(ctypes.Structure):
    """Mirrors BenchCall in benchmarks/cuda/portable_bench.cu."""

    _fields_ = (
        [(name, INT) for name in NAMES.split()]
        + [(name, LONG) for name in ("m", "n", "k", "x_stride")]
        + [(name, POINTER) for name in POINTERS.split()]
        + [("workspace_bytes", LONG), ("text", ctypes.c_char * 512)]
    )


def bits_to_floats(words, device="cuda"):
    signed = [w - (1 << 32) if w >> 31 else w for w in words]
    return torch.tensor(signed, dtype=torch.int32, device=device).view(torch.float32)


class Weight:
    """Random 4-bit weight [n][k]; `shift` bytes off a 256-byte boundary."""

    def __init__(self, n, k, block=64, nested=True, quant_type=0, shift=0, device="cuda"):
        self.n, self.k, self.block, self.nested, self.quant_type = n, k, block, nested, quant_type
        count = (n * k + 1) // 2
        self.memory = torch.randint(0, 256, (count + shift + 256,), dtype=torch.uint8, device=device)
        self.packed = self.memory[shift : shift + count]
        blocks = (n * k + block - 1) // block
        if nested:
            self.codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device)
            self.nested_absmax = torch.rand((blocks + 255) // 256, device=device) * 0.02 + 0.01
            self.nested_code = torch.sort(torch.rand(256, device=device) * 2 - 1).values
            self.offset = torch.tensor(0.04, device=device)
        else:
            self.absmax = torch.rand(blocks, device=device) * 0.05 + 0.01

    def scales(self):
        if not self.nested:
            return self.absmax
        nested = self.nested_absmax.repeat_interleave(256)[: self.codes.numel()]
        product = self.nested_code[self.codes.long()] * nested
        return product + self.offset

    def dense(self, dtype):
        """The weights as dequantize_4bit gives them: fp32 product, one rounding."""
        codes = torch.stack((self.packed >> 4, self.packed & 15), 1).flatten()[: self.n * self.k]
        values = bits_to_floats(FP4 if self.quant_type else NF4, self.packed.device)[codes.long()]
        scales = self.scales().repeat_interleave(self.block)[: self.n * self.k]
        return (values * scales).to(dtype).view(self.n, self.k)


class Kernels:
    """The library, and one workspace for calls that run one after another."""

    def __init__(self, path, workspace=32 << 20):
        self.library = ctypes.CDLL(path)
        major, minor = torch.cuda.get_device_capability()
        self.sm, self.sms = major * 10 + minor, torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.full((workspace,), 0x7F, dtype=torch.uint8, device="cuda")  # no plan may ask for more

    def call(self, weight, x, out, direction, path=AUTO, variant=-1, cut=0, repeat=1, bias=None, dense=None):
        c = BenchCall()
        c.path, c.variant, c.cut, c.repeat, c.direction = path, variant, cut, repeat, direction
        c.dtype = 2 if x.dtype == torch.bfloat16 else 1
        c.quant_type, c.block_size, c.sm, c.sm_count = weight.quant_type, weight.block, self.sm, self.sms
        c.m, c.n, c.k, c.x_stride = x.shape[0], weight.n, weight.k, x.stride(0) if x.shape[0] > 1 else 0
        c.x, c.out = x.data_ptr(), out.data_ptr()
        c.packed = (weight.packed if dense is None else dense).data_ptr()
        if weight.nested:
            c.codes, c.nested_absmax = weight.codes.data_ptr(), weight.nested_absmax.data_ptr()
            c.nested_code, c.offset = weight.nested_code.data_ptr(), weight.offset.data_ptr()
        else:
            c.absmax = weight.absmax.data_ptr()
        c.bias = bias.data_ptr() if bias is not None else None
        return c

    def plan(self, c):
        if self.library.bench_plan(ctypes.byref(c)):
            raise RuntimeError(c.text.decode())
        if c.workspace_bytes > self.workspace.numel():
            raise RuntimeError(f"the plan wants {c.workspace_bytes} bytes of workspace: {c.text.decode()}")
        c.workspace = self.workspace.data_ptr() if c.workspace_bytes else None
        return c.text.decode()

    def run(self, c):
        c.stream = torch.cuda.current_stream().cuda_stream
        if self.library.bench_run(ctypes.byref(c)):
            raise RuntimeError(c.text.decode())
