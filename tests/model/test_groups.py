"""Caches of several groups against an oracle that works by layers and tokens, on random layouts and histories.

A failure shows the seed, the layout and the last operations. That the oracle is not blind is shown with caches that are
broken on purpose: each must be caught.
"""

import inspect
import random
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.model.group_pair import Pair
from tests.model.group_walk import Walk
from tests.model.layers import Layers, tokens_looked_at
from tests.model.layouts import Layout, random_layout

from kvpool import ChunkedLocal, FullAttention, LayerKind, Request, SlidingWindow, StateSpace, UsageError
from kvpool.core import manager, room
from kvpool.core.chosen import ChosenPool
from kvpool.core.groups import Group, Groups
from kvpool.core.publication import Publication
from kvpool.core.room import Room

HISTORY_LENGTH = 500

REACHED = [
    "hits", "lagging", "published", "evictions", "null blocks", "admitted", "refused", "short", "preempted", "external",
    "drafts", "steps", "batch steps", "unserved", "invalidated", "cut back", "cleared",
]  # fmt: skip


def run_history(seed: object, index: int, num_operations: int = HISTORY_LENGTH) -> Walk:
    """A layout and a history that the seed and its index decide."""
    rng = random.Random(f"{seed}/{index}")
    walk = Walk(random_layout(rng), rng)
    try:
        walk.run(num_operations)
    except Exception as error:
        error.add_note(f"--seed {seed}, history {index}: {walk.layout}\n" + "\n".join(walk.log[-40:]))
        raise
    return walk


def test_cache_and_oracle_agree_after_every_operation(seed: int, num_operations: int) -> None:
    """Half as many operations as the histories of one group have: 100,000, with --deep a million."""
    reached: Counter[str] = Counter()
    for index in range(num_operations // 2 // HISTORY_LENGTH):
        walk = run_history(seed, index)
        reached += walk.pair.counts
        reached["evictions"] += walk.pair.cache.num_evictions
    print(dict(reached))
    assert [what for what in REACHED if not reached[what]] == []


@pytest.mark.parametrize(
    "kind", [FullAttention(), SlidingWindow(1), SlidingWindow(5, num_sinks=3), ChunkedLocal(6), StateSpace()]
)
def test_what_a_token_does_not_look_at_no_later_one_does(kind: LayerKind) -> None:
    """So the oracle may ask the next token alone whether a block is dead."""
    for n in range(40):
        later = tokens_looked_at(kind, n + 1) - {n}
        assert later <= tokens_looked_at(kind, n)


def test_what_kinds_look_at() -> None:
    window, state = Layers(0, SlidingWindow(5, num_sinks=1), 2), Layers(0, StateSpace(), 4)
    assert tokens_looked_at(window.kind, 10) == {0, 6, 7, 8, 9}
    assert window.blocks_looked_at(10) == [0, 3, 4]
    assert window.blocks_of_hit(10, 2) == [0, 2, 3, 4]
    assert tokens_looked_at(ChunkedLocal(4), 10) == {8, 9}
    assert tokens_looked_at(ChunkedLocal(4), 8) == set()
    assert (state.blocks_looked_at(8), state.blocks_of_hit(8, 4)) == ([1], [0])


def spoil_what_ended() -> None:
    """One request ends; a block in its middle turns out bad."""
    pair = Pair(Layout((FullAttention(4),), 20, "every", False, 64), check_interval=1)
    request = Request("a", range(16))
    live = pair.admit(request, pair.match(request, None), 0, 16)
    assert live is not None
    pair.commit(live, 16)
    pair.free(live)
    pair.invalidate({2})
    pair.check(0)
    assert pair.match(Request("b", range(16)), None)[0].num_tokens == 4


def test_what_depends_on_a_bad_block_is_withdrawn() -> None:
    spoil_what_ended()


# -- the oracle is not blind


def rewritten(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The function with this text in place of that."""
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{function.__qualname__} does not say {old!r} any more: break it in another way"
    names: dict[str, Any] = {}
    exec(source.replace(old, new), inspect.unwrap(function).__globals__, names)
    return next(value for name, value in names.items() if name == function.__name__)  # type: ignore[no-any-return]


def nothing(*_: object, **__: object) -> int:
    return 0


REWRITTEN: dict[str, tuple[object, str, str, str]] = {
    "a window forgets a token": (SlidingWindow, "first_live", "+ 1", "+ 2"),
    "a window keeps a token too many": (SlidingWindow, "first_live", "+ 1", ""),
    "a chunk ends late": (ChunkedLocal, "first_live", "num_tokens //", "max(num_tokens - 1, 0) //"),
    "a state is published off its border": (Publication, "_state_runs", "length != table.num_computed or ", ""),
    "junctions are no boundaries": (Publication, "boundaries", "(replay, junction)", "(replay,)"),
    "external tokens get blocks behind the window": (Group, "new_blocks", "if live <= held:", "if True:"),
    "groups are asked once": (manager, "longest_hit", "longest != before", "before == -1"),
}
"""Where a cache is broken, and which words become which."""

REPLACED: dict[str, tuple[object, str, object]] = {
    "sinks are forgotten": (Group, "num_sink_blocks", 0),
    "nothing slides": (Room, "slide", nothing),
    "another block than the null block is placed": (room, "NULL_BLOCK", 1),
    "rejected drafts keep their blocks": (Room, "cut", nothing),
    "hits end at any block": (Groups, "align", lambda groups, n: n - n % groups.unit),
    "no block is dropped": (Groups, "num_dropped_tokens", 0),
    "hits are not touched": (ChosenPool, "touch", nothing),
    "the promised bound is too low": (SlidingWindow, "max_live_blocks", lambda *_: 1),
}
"""Where a cache is broken, and what stands there instead."""


def run_histories(seed: str, count: int) -> None:
    for index in range(count):
        run_history(seed, index, 200)


def must_be_caught() -> None:
    with pytest.raises((AssertionError, UsageError, IndexError)):
        run_histories("broken", 200)


@pytest.mark.parametrize("what", REWRITTEN)
def test_a_wrong_line_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, old, new = REWRITTEN[what]
    monkeypatch.setattr(owner, name, rewritten(getattr(owner, name), old, new))
    must_be_caught()


@pytest.mark.parametrize("what", REPLACED)
def test_a_missing_part_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*REPLACED[what])
    must_be_caught()


def test_names_that_are_not_withdrawn_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChosenPool, "withdraw", nothing)
    with pytest.raises(AssertionError, match="depend on a bad block"):
        spoil_what_ended()
