"""One host arena for the processes of a host that stream the same base: the first fills it, the others map it."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import socket
from collections.abc import Callable

import torch.distributed as dist

from .native import Arena


def host() -> str:
    """The same for processes that can map each other's memory: one kernel, one process namespace."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def fingerprint(weights, store) -> str:
    """Of what a process would read: equal for equal layers of equal stores."""
    layers = [[(w.stored.name, w.stored.shape, w.stored.blocksize, w.stored.parts()) for w in row] for row in weights]
    files = sorted((path.name, path.stat().st_size) for path in store.path.glob("*.safetensors"))
    return hashlib.sha256(json.dumps([layers, files]).encode()).hexdigest()


class Shared:
    """What processes that call nybble.stream(share=...) tell each other; all make the same calls in the same order."""

    def __init__(self, rank: int, gather: Callable[[object], list]):
        """gather: every rank's value in the order of ranks, on every rank."""
        self._gather = gather
        hosts = gather(host())
        self._leader = hosts.index(hosts[rank])
        self.leads = self._leader == rank
        self._message: dict = {}

    def new_arena(self) -> Arena:
        """The leader's, to be filled."""
        arena = Arena.shared()
        self._message = {"path": f"/proc/{os.getpid()}/fd/{arena.file}"}
        return arena

    def arena_of_leader(self) -> Arena:
        """The others', after filled()."""
        return Arena.attach(self._leader_message["path"])

    def filled(self, digest: str, error: Exception | None = None) -> None:
        """By all: the leaders' arenas are complete. Raises where one of them failed; on that leader, its own error."""
        mine = {**self._message, "digest": digest, "error": str(error) if error else None}
        messages = self._gather(mine if self.leads else {"error": None})
        if error is not None:
            raise error
        failed = {rank: message["error"] for rank, message in enumerate(messages) if message["error"]}
        if failed:
            raise RuntimeError(f"a rank that fills the host arena failed: {failed}")
        self._leader_message = messages[self._leader]

    def attached(self, digest: str, error: Exception | None = None) -> None:
        """By all, once their layers are there. Raises on all where one failed, so that none waits for another."""
        wrong = str(error) if error else None
        if wrong is None and digest != self._leader_message["digest"]:
            wrong = f"its store has other weights than that of rank {self._leader}"
        failed = {rank: text for rank, text in enumerate(self._gather(wrong)) if text}
        if error is not None:
            raise error
        if failed:
            raise ValueError(f"the host arena can't be shared: {failed}; expected the same store on every rank")


def of_group(group) -> Shared:
    """group: a torch.distributed process group, or True for the default one."""
    group = None if group is True else group

    def gather(value) -> list:
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group)
        return found

    return Shared(dist.get_rank(group), gather)
