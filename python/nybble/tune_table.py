"""The tune table that plans follow in this process: one for all, in the library. What makes one: nybble.tune."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
from collections.abc import Iterable, Iterator

from ._library import lib
from .errors import check


def use(table: str | os.PathLike | None) -> None:
    """Makes the table in a file the one that plans follow from now on, in this process; None: no table.

    ValueError for a file that is not a tune table, OSError for one that cannot be read; the table before stays then.
    """
    text = None if table is None else pathlib.Path(table).read_text(encoding="utf-8")
    activate(text)


def active() -> tuple[str, int]:
    """The table that plans follow, as JSON text, and the hash that they print; ("", 0) without one."""
    needed, digest = ctypes.c_size_t(), ctypes.c_uint64()
    check(lib.nybble_tune_table(None, ctypes.c_size_t(0), ctypes.byref(needed), ctypes.byref(digest)))
    text = ctypes.create_string_buffer(needed.value)
    check(lib.nybble_tune_table(text, needed, ctypes.byref(needed), ctypes.byref(digest)))
    return text.value.decode(), digest.value


def activate(text: str | None) -> None:
    """As use(), with the text of a file."""
    check(lib.nybble_set_tune_table(None if text is None else text.encode()))


def entry(device: str, problem, m_min: int, m_max: int, path: str) -> dict:
    """One line of a table. problem: any Problem of the shape, direction and dtype."""
    shape = dict(direction=problem.direction, dtype=problem.dtype_name, n=problem.n, k=problem.k)
    return dict(device=device, **shape, m_min=m_min, m_max=m_max, path=path)


def to_text(entries: Iterable[dict], measured: Iterable[dict] = ()) -> str:
    """A table as its file has it, an entry a line."""

    def lines(rows):
        return ",".join("\n  " + json.dumps(row) for row in rows) + "\n "

    parts = f'{{\n "nybble_tune": 1,\n "entries": [{lines(entries)}]'
    return parts + (f',\n "measured": [{lines(measured)}]\n}}\n' if measured else "\n}\n")


@contextlib.contextmanager
def forced(device: str, problem, path: str) -> Iterator[None]:
    """While it lasts, plans for exactly this problem take `path` where its kernel takes the problem."""
    before, _ = active()
    activate(to_text([entry(device, problem, problem.m, problem.m, path)]))
    try:
        yield
    finally:
        activate(before or None)
