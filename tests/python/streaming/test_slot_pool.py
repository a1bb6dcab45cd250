"""SlotPool: a trainer's own recycled buffers, checked by the multiply."""

import gc

import pytest
import torch

import nybble
from nybble.streaming import native

N, K = 48, 64


class Trainer:
    """Two weights, one slot of two buffers (packed and scales)."""

    def __init__(self):
        self.pool = nybble.SlotPool()
        self.stored = []
        for _ in range(2):
            packed, state = nybble.quantize_4bit(torch.randn(N, K))
            self.stored.append((packed, state.absmax))
        self.packed, self.absmax = (torch.empty_like(tensor) for tensor in self.stored[0])
        self.slot = self.pool.add_slot([self.packed, self.absmax])
        self.uids = [self.pool.register(f"layers.{index}.q_proj") for index in range(2)]

    def fill(self, index: int, ready: bool = True) -> bool:
        after_now = self.pool.begin_fill(self.slot)
        self.packed.data.copy_(self.stored[index][0])
        self.absmax.data.copy_(self.stored[index][1])
        if ready:
            self.pool.ready(self.slot, self.uids[index])
        return after_now

    def multiply(self, x, index: int):
        return nybble.nf4_linear(x, self.packed, self.absmax, (N, K), guard=self.uids[index])

    def private(self, x, index: int):
        return nybble.nf4_linear(x, *self.stored[index], (N, K))


@pytest.fixture
def trainer():
    return Trainer()


def test_the_weight_that_the_slot_holds_multiplies_and_another_raises(trainer):
    x = torch.randn(5, K)
    for index in (0, 1, 0):
        trainer.fill(index)
        assert torch.equal(trainer.multiply(x, index), trainer.private(x, index))
        other = 1 - index
        with pytest.raises(
            nybble.StaleWeightError,
            match=rf"weight layers\.{other}\.q_proj expected, slot holds layers\.{index}\.q_proj",
        ):
            trainer.multiply(x, other)


def test_a_slot_being_filled_holds_nothing(trainer):
    x = torch.randn(5, K)
    trainer.fill(0)
    trainer.fill(0, ready=False)
    with pytest.raises(nybble.StaleWeightError, match=r"layers\.0\.q_proj expected, slot holds nothing"):
        trainer.multiply(x, 0)
    assert trainer.pool.holds(trainer.slot) == (native.slot_owner(trainer.slot)[0], 2) == (-1, 2)
    trainer.fill(0)
    assert torch.equal(trainer.multiply(x, 0), trainer.private(x, 0))


def test_the_backward_is_checked_too(trainer):
    """Checkpointed, so that autograd's version check is not there to help."""
    x = torch.randn(5, K, requires_grad=True)
    trainer.fill(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = trainer.multiply(x, 0)
        z = trainer.multiply(x, 0)
    y.sum().backward()
    private = torch.autograd.grad(trainer.private(x, 0).sum(), x)[0]
    assert torch.equal(x.grad, private)
    trainer.fill(1)
    with pytest.raises(RuntimeError, match=r"layers\.0\.q_proj expected, slot holds layers\.1\.q_proj"):
        z.sum().backward()


def test_a_fill_bumps_the_version_that_autograd_compares(trainer):
    x = torch.randn(5, K, requires_grad=True)
    trainer.fill(0)
    y = trainer.multiply(x, 0)
    trainer.fill(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_begin_fill_says_what_the_copy_must_wait_for(trainer):
    x = torch.randn(5, K)
    assert trainer.fill(0) is False  # nothing was in the slot
    assert trainer.fill(1) is True  # never released
    trainer.pool.release(trainer.slot)
    assert trainer.fill(0) is False
    trainer.multiply(x, 0)
    trainer.pool.release(trainer.slot)
    trainer.multiply(x, 0)
    assert trainer.fill(1) is True  # read after its release


def test_bytes_outside_every_slot_have_left_the_ring(trainer):
    x = torch.randn(5, K)
    trainer.fill(0)
    trainer.packed = trainer.packed.clone()
    with pytest.raises(nybble.StaleWeightError, match=r"weight layers\.0\.q_proj left the ring"):
        trainer.multiply(x, 0)


def test_weights_of_one_layer_share_a_slot_and_names():
    pool = nybble.SlotPool()
    buffer = torch.empty(64, dtype=torch.uint8)
    slot = pool.add_slot(buffer)
    query, key = pool.register("layers.7", ["q_proj", "k_proj"])
    assert (query.dtype, query.dim(), query.device.type) == (torch.int64, 0, "cpu")
    pool.begin_fill(slot)
    with pytest.raises(nybble.StaleWeightError, match=r"layers\.7\.k_proj"):
        native.verify_owner(int(key), [buffer.data_ptr()])
    pool.ready(slot, query)
    native.verify_owner(int(key), [buffer.data_ptr(), buffer.data_ptr() + 63])
    pool.remove_slot(slot)
    with pytest.raises(nybble.StaleWeightError, match="left the ring"):
        native.verify_owner(int(key), [buffer.data_ptr()])


def test_bad_buffers_are_refused_and_a_dead_pool_gives_its_slots_back():
    pool = nybble.SlotPool()
    buffer = torch.empty(8, 8)
    with pytest.raises(ValueError, match="expected contiguous"):
        pool.add_slot(buffer.t()[:, :4])
    with pytest.raises(ValueError, match="at least one byte"):
        pool.add_slot(buffer[:0])
    pool.add_slot(buffer)
    with pytest.raises(ValueError, match="overlaps a range of slot"):
        nybble.SlotPool().add_slot(buffer[2:])
    del pool
    gc.collect()
    pool = nybble.SlotPool()
    pool.add_slot(buffer)
    pool.close()
    pool.close()
    nybble.SlotPool().add_slot(buffer)
