"""Kinds of layers as they are written on a command line: `full,5*window:1024`.

Knows nothing of: what is done with them.
"""

import re

from kvpool.errors import ConfigError
from kvpool.limits import MAX_GROUPS
from kvpool.plan.kinds import ChunkedLocal, FullAttention, LayerKind, SlidingWindow, StateSpace

HOW = "[N*]KIND[/BLOCK_SIZE],… with KIND one of full, window:W, window:W+SINKS, chunk:C, state, state:EVERY, state:none"
_GROUP = re.compile(r"(?:(\d+)\*)?(full|window|chunk|state)(?::(\d+|none)(?:\+(\d+))?)?(?:/(\d+))?")


def read_groups(text: str) -> tuple[LayerKind, ...]:
    """The groups that `text` names, in order. ConfigError with the part that cannot be read, and how it is written."""
    groups: list[LayerKind] = []
    for part in text.replace("_", "").split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--groups: {part!r} is no group: {HOW}")
        count, name, argument, sinks, block_size = match.groups()
        kind = _kind(part, name, argument, sinks, int(block_size) if block_size else None)
        if len(groups) + int(count or 1) > MAX_GROUPS:
            raise ConfigError(f"--groups: {part!r} makes it more than {MAX_GROUPS}: at most {MAX_GROUPS} share a pool")
        groups += [kind] * int(count or 1)
    return tuple(groups)


def _kind(part: str, name: str, argument: str | None, sinks: str | None, block_size: int | None) -> LayerKind:
    match name, argument, sinks:
        case "full", None, None:
            return FullAttention(block_size)
        case "window", str(window), _ if window != "none":
            return SlidingWindow(int(window), int(sinks or 0), block_size)
        case "chunk", str(chunk), None if chunk != "none":
            return ChunkedLocal(int(chunk), block_size)
        case "state", _, None:
            interval = int(argument) if argument not in (None, "none") else argument
            return StateSpace(interval, block_size=block_size)
    raise ConfigError(f"--groups: {part!r} is no group: {HOW}")
