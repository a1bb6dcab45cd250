"""The model of docs/portable.md: the fused kernel's time / (separate dequantisation + dense multiply), for cards that
were not measured. Prints the table of docs/portable.md. portable_time.py checks it on an H200 with slowed tensor cores.

    dequantisation   n k DEQUANT_BYTES / (DEQUANT_SHARE bandwidth)
    dense multiply   2 m n k / (MULTIPLY_SHARE rate)              dequantisation / multiply = tokens / m
    fused            card.fused of the dense multiply             ratio = fused / (1 + tokens / m)
"""

import dataclasses

DEQUANT_BYTES = 0.5 + 2 + 1 / 64 + 4 / (64 * 256)  # packed, bf16, scale code, nested scale; a weight
DEQUANT_SHARE = 0.85  # of the memory bandwidth
MULTIPLY_SHARE = 0.90  # of the tensor cores' rate
MOST_OFF = 0.15  # measured / predicted - 1, either way


@dataclasses.dataclass(frozen=True)
class Card:
    name: str
    capability: str
    tflops: float  # 16-bit inputs, fp32 accumulators, as the vendor gives it
    terabytes: float  # a second, of memory bandwidth
    fused: float = 1.02  # of its own dense multiply: mma of 32 clocks leave issue slots and register reads for decoding

    @property
    def tokens(self):
        """m at which a separate dequantisation takes as long as the multiply."""
        dequant = DEQUANT_BYTES / (DEQUANT_SHARE * self.terabytes)
        return dequant / (2 / (MULTIPLY_SHARE * self.tflops))

    def ratio(self, m):
        return self.fused / (1 + self.tokens / m)


CARDS = (
    Card("RTX 3050", "8.6", 18, 0.224),
    Card("RTX 3060", "8.6", 25.5, 0.36),
    Card("RTX 4060", "8.9", 30, 0.272),
    Card("RTX 4090", "8.9", 165, 1.01),
    Card("RTX 5070", "12.0", 62, 0.67),
    Card("RTX 5090", "12.0", 210, 1.79),
    Card("A100 80 GB", "8.0", 312, 2.04, fused=1.08),  # mma of 8 clocks
)

# An H200 whose every mma.sync m16n8k16 (2 x 2048 flops) is issued five times: 6 clocks each on a scheduler, four
# schedulers an SM, 132 SMs, 1.98 GHz boost, 4.8 TB/s. 30 clocks, near the 32 of GeForce cards: their `fused`.
MMA_FLOPS, MMA_CLOCKS, REPEAT = 4096, 6, 5
SLOW_H200 = Card("H200, mma x 5", "9.0", MMA_FLOPS * 4 * 132 * 1.98e-3 / (MMA_CLOCKS * REPEAT), 4.8)


def checks(cells, measured, share):
    """For every cell: predicted, measured(cell), how far the measured is off, and both dequantisation shares of the
    dense multiply. Cells whose measured is None are left out.
    """
    rows = []
    for cell in cells:
        value = measured(cell)
        if value is None:
            continue
        predicted = SLOW_H200.ratio(cell["m"])
        row = dict(n=cell["n"], k=cell["k"], m=cell["m"], direction=cell["direction"], predicted=predicted)
        row |= dict(measured=value, off=value / predicted - 1, within=abs(value / predicted - 1) <= MOST_OFF)
        rows.append(row | dict(share_predicted=SLOW_H200.tokens / cell["m"], share_measured=share(cell)))
    return rows


def table():
    lines = ["| card (capability) | R | TB/s | m = 512 | 2048 | 8192 |", "|---|---|---|---|---|---|"]
    for card in CARDS:
        ratios = " | ".join(f"{card.ratio(m):.2f}".lstrip("0") for m in (512, 2048, 8192))
        bandwidth = f"{card.terabytes:.4g}".lstrip("0")
        lines.append(f"| {card.name} ({card.capability}) | {card.tflops:g} | {bandwidth} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print(
        f"{SLOW_H200.name}: {SLOW_H200.tflops:.1f} TFLOPS, c {SLOW_H200.tokens:.1f}; predicted "
        + ", ".join(f"{SLOW_H200.ratio(m):.4f} at m = {m}" for m in (512, 1024, 2048))
    )
