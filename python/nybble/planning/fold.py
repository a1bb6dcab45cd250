"""A trace of few layers, unfolded to that of many equal ones.

Layers of one kind allocate and free alike, so the trace of a model with five of them has everything: the first and the
last, which differ, and a middle one, whose forward and backward are repeated. A freed storage belongs to the layer it
was born in, by its distance to the layer that frees it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

_LAYER = re.compile(r"\.layers\.(\d+)\.")
TRACED = 5  # of each kind: two on either side of the one that is repeated
MIDDLE = 2


Birth = tuple[str, int, int]  # way and layer of the segment that a storage was born in, and its number there
Event = tuple[Birth, int, str]  # birth, bytes or -1, kind


@dataclasses.dataclass
class Segment:
    """A run of events: way "f" or "b", forward or backward, of `layer`; way "" for one between them, numbered."""

    way: str
    layer: int
    events: list[Event]


def cut(events: list[tuple[int, int]], kinds: list[str], starts: list[tuple[int, str, int]]) -> list[Segment]:
    """starts: (first event, way, layer) in order. kinds: of the events' keys."""
    births: dict[int, Birth] = {}
    segments = []
    for index, (begin, way, layer) in enumerate(starts):
        end = starts[index + 1][0] if index + 1 < len(starts) else len(events)
        segment, born = Segment(way, layer, []), 0
        for key, size in events[begin:end]:
            if size >= 0:
                births[key] = (way, layer, born)
                born += 1
            segment.events.append((births[key], size, kinds[key]))
        segments.append(segment)
    return segments


def place(segments: list[Segment], at: int) -> tuple[str, int, int]:
    """Way and layer of the segment that event number `at` is in, and its number there."""
    for segment in segments:
        if at < len(segment.events):
            return segment.way, segment.layer, at
        at -= len(segment.events)
    raise IndexError(at)


def moved(layer: int, middle: int, extra: int) -> int:
    return layer + extra if layer > middle else layer


def repeat(segments: list[Segment], middle: int, extra: int) -> list[Segment]:
    """Layer `middle` stands for itself and `extra` more, which follow it; later layers move up."""

    def instance(segment: Segment, layer: int) -> Segment:
        events: list[Event] = []
        # between layers, one layer's storages are freed in a row: so are those of each copy
        own = not segment.way
        for of_middle, run in itertools.groupby(
            segment.events, lambda event: own and bool(event[0][0]) and event[0][1] == middle
        ):
            run = list(run)
            for copy in range(extra + 1 if of_middle else 1):
                for (way, born, number), size, kind in run:
                    if way:
                        born = layer + born - segment.layer if segment.way else moved(born, middle, extra) + copy
                    events.append(((way, born, number), size, kind))
        return Segment(segment.way, layer, events)

    unfolded = []
    for segment in segments:
        if not segment.way:
            unfolded.append(instance(segment, segment.layer))
        elif segment.layer != middle:
            unfolded.append(instance(segment, moved(segment.layer, middle, extra)))
        else:
            copies = [instance(segment, middle + copy) for copy in range(extra + 1)]
            unfolded += copies if segment.way == "f" else copies[::-1]
    return unfolded


def join(segments: list[Segment]) -> tuple[list[tuple[int, int]], list[str], dict[tuple[str, int], int]]:
    """Events with keys numbered anew, the kinds of the keys, and each segment's first event by way and layer."""
    keys: dict[Birth, int] = {}
    events: list[tuple[int, int]] = []
    kinds: list[str] = []
    begins = {}
    for segment in segments:
        begins[segment.way, segment.layer] = len(events)
        for birth, size, kind in segment.events:
            if size >= 0:
                keys[birth] = len(keys)
                kinds.append(kind)
            events.append((keys[birth], size))
    return events, kinds, begins


def repeat_sizes(sizes: list[tuple[str, int]], middle: int, extra: int) -> list[tuple[str, int]]:
    """(name, bytes) of parameters likewise: those of layer `middle` once more for each extra layer."""
    before, after = [], []
    copies: list[list[tuple[str, int]]] = [[] for _ in range(extra + 1)]
    for name, size in sizes:
        layer = _LAYER.search(name)
        number = int(layer[1]) if layer else -1
        if number == middle:
            for copy, entries in enumerate(copies):
                entries.append((_LAYER.sub(f".layers.{middle + copy}.", name), size))
        elif number > middle:
            after.append((_LAYER.sub(f".layers.{number + extra}.", name), size))
        else:
            (after if copies[0] else before).append((name, size))
    return [*before, *[entry for entries in copies for entry in entries], *after]
