"""Faults of the product, planted from outside, each with the verdict that every gate must give.

A mutation is a context manager; the wheel contains none of it. `expected` names the gates that must not say ok, with
their exit codes: 1 product wrong, 2 a control did not fail, 3 no verdict.
"""

import contextlib
from collections.abc import Callable
from ctypes import byref, c_int32, c_uint64
from dataclasses import dataclass, field
from unittest import mock

import torch

from nybble import _ops, autograd
from nybble.gate import runner
from nybble.gate.aliasing import stacks
from nybble.quant_state import MODE_CODES
from nybble.streaming import native
from nybble.streaming.pool import SlotPool

PACKED, ABSMAX = 1, 2  # places in the arguments of the ops
CHUNK = 1 << 20
LATE_US = 50_000  # a copy that nobody waits for; a layer's visit takes a few ms


@dataclass
class Mutation:
    """plant() makes the context in which the product is wrong."""

    name: str
    plant: Callable[[], contextlib.AbstractContextManager]
    expected: dict[str, int | tuple[int, ...]] = field(default_factory=dict)  # several codes: chance picks one

    def codes(self, gate: str) -> tuple[int, ...]:
        """The exit codes that a gate may give."""
        expected = self.expected.get(gate, 0)
        return expected if isinstance(expected, tuple) else (expected,)


@contextlib.contextmanager
def nothing():
    yield


def around_forward(change, restore):
    """The forward op, with its arguments changed in place while it runs: same storages, same owners, same launches."""
    real = _ops.linear_4bit

    def op(*arguments):
        change(arguments)
        try:
            return real(*arguments)
        finally:
            restore(arguments)

    return mock.patch.object(_ops, "linear_4bit", op)


def swap_nibbles(arguments):
    flat = arguments[PACKED].data.view(-1)
    for first in range(0, flat.numel(), CHUNK):
        part = flat[first : first + CHUNK]
        part.copy_((part >> 4) | (part << 4))


def shift_scales(by):
    def shift(arguments):
        scales = arguments[ABSMAX].data
        scales.copy_(scales.roll(by))

    return shift


def mode_dequant():
    """mode="auto" dequantises and tells nobody."""
    mode = -2  # the last but one argument of both ops

    def dense(real):
        def op(*arguments):
            given = list(arguments)
            given[mode] = MODE_CODES["dequant"]
            return real(*given)

        return op

    return mock.patch.multiple(
        _ops, linear_4bit=dense(_ops.linear_4bit), linear_4bit_grad_input=dense(_ops.linear_4bit_grad_input)
    )


def flip_last_bits():
    """A result that depends on who came first: one bit of one element, another one at each call."""
    real, calls = _ops.linear_4bit, [0]

    def op(*arguments):
        y = real(*arguments)
        if arguments[-2] != MODE_CODES["dequant"] and y.numel():
            calls[0] += 1
            y.view(torch.int16).view(-1)[calls[0] % y.numel()] ^= 1
        return y

    return mock.patch.object(_ops, "linear_4bit", op)


class KeepsScales(autograd.LinearFunction):
    """Saves packed; the scales ride on ctx."""

    @staticmethod
    def forward(ctx, x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, spec, guard):
        ctx.scales = absmax, code, nested_absmax, nested_code, offset, uid
        ctx.save_for_backward(packed)
        ctx.spec, ctx.guard, ctx.bias_dtype = spec, guard, None
        return autograd._launch(
            _ops.linear_4bit, x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, *spec
        )

    @staticmethod
    def backward(ctx, grad_y):
        (packed,) = ctx.saved_tensors
        grad_x = autograd.launch_grad_input(grad_y, (packed, *ctx.scales), ctx.spec, ctx.guard)
        return grad_x, *[None] * 10


class KeepsWeight(autograd.LinearFunction):
    """The whole weight rides on ctx."""

    @staticmethod
    def forward(ctx, x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, spec, guard):
        tensors = packed, absmax, code, nested_absmax, nested_code, offset
        ctx.weight = (*tensors, uid)
        ctx.spec, ctx.guard = spec, guard
        return autograd._launch(_ops.linear_4bit, x, *tensors, bias, uid, *spec)

    @staticmethod
    def backward(ctx, grad_y):
        return autograd.launch_grad_input(grad_y, ctx.weight, ctx.spec, ctx.guard), *[None] * 10


class KeepsCopy(KeepsWeight):
    """A private copy of the weight rides on ctx: right gradients, the memory of the model."""

    @staticmethod
    def forward(ctx, x, *rest):
        y = KeepsWeight.forward(ctx, x, *rest)
        ctx.weight = (*(t if t is None else t.clone() for t in ctx.weight[:-1]), None)
        return y


def function(kind):
    return lambda: mock.patch.object(autograd, "LinearFunction", kind)


def owner_stays():
    """A refill begins without taking the slot from its owner."""

    def begin_fill(self, slot):
        for tensor in self._slots[slot]:
            torch.autograd.graph.increment_version(tensor)
        return True

    return mock.patch.object(SlotPool, "begin_fill", begin_fill)


class NumberedRing(native.Ring):
    """Knows the ids of its slots in the owner table, and whom each layer belongs to."""

    def __init__(self, arena, uids, slots, **options):
        before = native.register_slot(torch.empty(1).split(1))  # ids are given out one after the other
        native.lib.nybble_unregister_slot(before)
        super().__init__(arena, uids, slots, **options)
        self.ids, self.uids = [before + 1 + index for index in range(len(slots))], list(uids)

    def own(self, index, layer):
        native.check(native.lib.nybble_set_owner(self.ids[index], self.uids[layer]))


class OwnsAtIssue(NumberedRing):
    """A slot belongs to the next layer as soon as its refill is issued: reads of bytes in flight pass the check."""

    def acquire(self, layer, order, compute_stream=None):
        super().acquire(layer, order, compute_stream)
        for index in range(len(self.slots)):
            status = self.status(index)
            if status["state"] == "loading":
                self.own(index, status["layer"])


class NeverWaits(NumberedRing):
    """Acquire issues the refill and names the owner, and does not wait for the bytes, which take a while."""

    def __init__(self, arena, uids, slots, **options):
        super().__init__(arena, uids, slots, **{**options, "delay_us": max(LATE_US, options.get("delay_us", 0))})

    def acquire(self, layer, order, compute_stream=None):
        landed, refilled = c_int32(), c_uint64()
        outcome = byref(landed), byref(refilled)
        native.check(native.lib.nybble_ring_acquire(self.handle, layer, order, compute_stream, 0, *outcome))
        for index, slot in enumerate(self.slots):
            if refilled.value >> index & 1:
                torch.autograd.graph.increment_version(slot)
                self._versions[index] = slot._version
        self.own(layer % len(self.slots), layer)


def streamed(code):
    """The gates that compare a streamed model all end with this."""
    return dict.fromkeys(("equality", "exact", "race"), code)


def ring(kind):
    return lambda: mock.patch.object(native, "Ring", kind)


def acquire_skipped():
    """In a backward, a layer's weights are not fetched again."""
    real = native.Ring.acquire

    def acquire(self, layer, order, compute_stream=None):
        if order != native.BACKWARD:
            real(self, layer, order, compute_stream)

    return mock.patch.object(native.Ring, "acquire", acquire)


@contextlib.contextmanager
def zero_adapters():
    """LoRA B is zero in every model."""
    from nybble.gate.equality import gate as equality
    from nybble.gate.training import models

    made = models.with_adapters

    def with_zero_adapters(*arguments, **options):
        model = made(*arguments, **options)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.zero_()
        return model

    make = stacks.make_parameters

    def zero_parameters(*arguments, **options):
        parameters = make(*arguments, **options)
        for value in parameters.must_be_nonzero:
            value.data.zero_()
        return parameters

    with (
        mock.patch.object(equality.models, "with_adapters", with_zero_adapters),
        mock.patch("nybble.gate.aliasing.gate.make_parameters", zero_parameters),
    ):
        yield


def compare_nothing():
    """The comparison of tensors finds no name that both sides have."""
    return mock.patch.object(runner, "compare", lambda got, want: ([0.0] * len(want), 0))


def not_switched():
    """The resident model keeps bitsandbytes' own linears."""
    from nybble.gate.training import models

    return mock.patch.object(models, "switched_linears", lambda model, kind=None: [])


MUTATIONS = (
    Mutation("none", nothing),
    Mutation("nibbles swapped", lambda: around_forward(swap_nibbles, swap_nibbles), {"numerics": 1}),
    Mutation("scales off by one", lambda: around_forward(shift_scales(1), shift_scales(-1)), {"numerics": 1}),
    Mutation(
        "dense path taken silently",
        mode_dequant,
        {"numerics": 1, "memory": 1, "equality": 1, "race": 1, "share": 1, "speed": 1},
    ),
    Mutation("last bits by arrival", flip_last_bits, {"aliasing": 3, "numerics": 1, "determinism": 1, **streamed(3)}),
    Mutation("one saved tensor dropped", function(KeepsScales), {"aliasing": 1}),
    Mutation("weight on ctx", function(KeepsWeight), {"aliasing": 1, **streamed(1)}),
    Mutation("private copies", function(KeepsCopy), {"aliasing": 3, "memory": 1, **streamed(3)}),
    Mutation("owner kept at issue", owner_stays, {"aliasing": 1}),
    Mutation("owner set at issue", ring(OwnsAtIssue), streamed(2)),
    # What lies in a slot before its first copy may be NaN, and then speed sees a loss that is none.
    Mutation("acquire does not wait", ring(NeverWaits), streamed(1) | {"speed": (0, 1)}),
    Mutation("acquire skipped in backward", acquire_skipped, streamed(1) | {"speed": 3}),
    Mutation("LoRA B zero", zero_adapters, {"aliasing": 3, **streamed(3)}),
    Mutation("nothing compared", compare_nothing, {"aliasing": 3, **streamed(3)}),
    Mutation("layers not switched", not_switched, streamed(3) | {"share": 3, "speed": 3}),
)
