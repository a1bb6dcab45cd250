"""Faults inside the kernels, which only a build with NYBBLE_FAULT_SWITCHES=ON has, and the gates that must see them.

Whether a race is lost at a given launch is chance, and so is which verdict a gate gives for a reference that does not
repeat: `RED` stands for 1 or 3. That a gate stays green is a prediction too, with its reason beside it.
"""

import contextlib
import ctypes
from dataclasses import dataclass, field

from nybble._library import lib

RED = frozenset({1, 3})
DELAYS = 40, 3000  # one visit of a place in 40 sleeps up to 3 us, in every row


@dataclass
class KernelMutation:
    """faults: names of src/device/fault.h. expected: exit codes by gate, 0 for the others."""

    name: str
    faults: tuple[str, ...] = ()
    expected: dict[str, frozenset[int]] = field(default_factory=dict)


KERNEL_MUTATIONS = (
    KernelMutation("none but delays"),
    # Sums in another order are as exact, so numerics stays green.
    KernelMutation(
        "atomics in the reduction",
        ("arrival_order",),
        {"determinism": frozenset({1}), "aliasing": frozenset({3}), "equality": frozenset({3})},
    ),
    # The hopper kernels, at M 300 and 600. The stack of aliasing is small_m's, which puts x in order long before wgmma
    # reads it: the stress test does not catch a missing fence there either.
    KernelMutation(
        "missing fence", ("no_proxy_fence",), {"numerics": frozenset({1}), "determinism": RED, "equality": RED}
    ),
    # The small_m kernels with more than one unit a CTA: only the weights of numerics and determinism are that large.
    KernelMutation("barrier released early", ("released_early",), {"numerics": frozenset({1}), "determinism": RED}),
)


def has_switches() -> bool:
    """Whether the loaded library was built with the switches."""
    return hasattr(lib, "nybble_plant_faults")


@contextlib.contextmanager
def planted(mutation: KernelMutation):
    """The kernels of this process have these faults inside the block."""
    plant(mutation.faults, *DELAYS)
    try:
        yield
    finally:
        plant((), 0, 1)


def plant(faults, delay_odds: int, delay_ns: int) -> None:
    lib.nybble_fault_name.restype = ctypes.c_char_p
    names = []
    while (name := lib.nybble_fault_name(len(names))) is not None:
        names.append(name.decode())
    mask = sum(1 << names.index(fault) for fault in faults)
    if lib.nybble_plant_faults(mask, delay_odds, delay_ns) != 0:
        raise RuntimeError(f"faults {faults} could not be planted on this device")
