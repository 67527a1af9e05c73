"""Whatever the rows of a decode batch are given from outside, there is an answer or an exception."""

import hashlib
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvpool._native import NativeBlockPool

if NativeBlockPool is None:
    pytest.skip("the native core is not built, or KVPOOL_NATIVE is 0", allow_module_level=True)

from tests.native.test_arguments import EXPECTED, NUM_BLOCKS, Endless, Liar, Part, ids, name, number

from kvpool._native import _core
from kvpool._native.pool import NativeBlockPool as Native

SIZE = 4
make: Any = _core.Rows


def layout(rng: random.Random) -> tuple[Any, ...]:
    windows = rng.choice([[], [(6, 1, [1])], [(6, 0, [0, 1])], [(3, 0, [0]), (9, 2, [1])]])
    return SIZE, rng.random() < 0.5, windows, [(0, False), (1, False)], [0, 1, 2, 3]


def state(rows: _core.Rows, pool: Native) -> object:
    lengths = np.asarray(rows.lengths()).tolist()
    tables = [np.asarray(rows.block_tables(group)).tolist() for group in range(2)]
    return lengths, tables, rows.unserved(), pool.free_block_ids(), rows.ending_rows()


class Thing:
    """A request, or a table, as far as rows care; it may do something when it is written to."""

    act: Callable[[], object] | None = None

    def __init__(self, **own: Any) -> None:
        self.__dict__.update(keeper=None, first_held=[0, 0], last_stop=0, is_decoding=False, request_id="r")
        self.__dict__.update(own)

    def __setattr__(self, name: str, value: object) -> None:
        if self.act is not None:
            self.act()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self.act is not None:
            self.act()
        super().__delattr__(name)


def table_of(block_ids: Any, first_held: list[int]) -> Thing:
    counts = {"num_slots": 0, "num_computed": 0, "num_committed": 0}
    return Thing(block_ids=block_ids, first_held=first_held, **counts)


def joined(
    rows: _core.Rows, length: int, blocks: list[list[int]], num_windows: int = 0, *, late: bool = True, **tail: Any
) -> tuple[Thing, Thing]:
    """A row as a cache makes it."""
    request = Thing(token_ids=[1] * length)
    table = table_of([list(ids) for ids in blocks], [0] * num_windows)
    options = {"limit": None, "parent": bytes(32), "extra": None, "plain_from": 0, **tail}
    tokens = [1] * (length % SIZE or min(length, SIZE))
    rows.add(
        request,
        table,
        "token_ids" if late else None,
        request.token_ids,  # type: ignore[attr-defined]
        table.block_ids,  # type: ignore[attr-defined]
        table.first_held,  # type: ignore[attr-defined]
        length - 1,
        options["limit"],
        tokens,
        options["parent"],
        options["extra"],
        options["plain_from"],
    )
    return request, table


def add(rng: random.Random, rows: _core.Rows, pool: Native, num_windows: int) -> None:
    count = rng.randint(1, 2)
    blocks = pool.allocate(2 * count)
    if blocks is None:
        return
    length = SIZE * (count - 1) + rng.randint(1, SIZE + 1)
    request, table = joined(
        rows,
        length,
        [blocks[:count], blocks[count:]],
        num_windows,
        late=rng.random() < 0.8,
        limit=rng.choice([None, length + 9]),
        extra=rng.choice([None, b"\x80"]),
        plain_from=rng.choice([0, 0, 0, 2**63 - 1]),
    )
    if rng.random() < 0.1:
        thing = rng.choice([request, table])

        def act() -> None:
            if rng.random() < 0.2:
                rows.remove(rows.requests()[: rng.randrange(3)])

        thing.act = act


def several_lists(rng: random.Random) -> Any:
    lists = [ids(rng) for _ in range(rng.choice([2, 2, 2, 0, 1, 3]))]
    if lists and rng.random() < 0.3:
        lists[0] = [Liar(lambda: lists.__delitem__(slice(1, None))), 1, 2]
    return rng.choice([lists, lists, lists, tuple(lists), None])


def thing(rng: random.Random) -> Any:
    return rng.choice([Thing(), table_of([[], []], [0, 0]), object(), None, 7])


def tail(rng: random.Random) -> Any:
    return rng.choice([[rng.randrange(3)] * rng.randrange(SIZE + 2), ids(rng), (1.5,), Endless(rng)])


def extra(rng: random.Random) -> Any:
    return rng.choice([None, b"x", "x", 7])


VERBS: dict[str, tuple[Part, ...]] = {
    "add": (thing, thing, extra, lambda rng: [1] * rng.randrange(9), several_lists, ids, number,
            number, tail, name, extra, number),
    "follow": (number, thing, number, tail, name, extra, number),
    "remove": (ids,),
    "step": (ids, number),
    "serve": (),
    "settle": (),
    "borders": (),
    "member": (number,),
    "read": (thing, lambda rng: rng.choice(["keeper", "x", 7])),
    "block_tables": (number,),
}  # fmt: skip


def given(rng: random.Random, verb: str, rows: _core.Rows) -> list[Any]:
    requests = rows.requests()
    count = len(requests)
    found = [part(rng) for part in VERBS[verb]]
    if found and rng.random() < 0.3:
        found[0] = Liar(lambda: rows.remove(requests[: count // 2]), rng.randrange(3))
    if verb == "follow" and count and rng.random() < 0.7:
        row = rng.randrange(count)
        found[:3] = [row, requests[row], int(np.asarray(rows.lengths())[row])]
    if verb == "step" and rng.random() < 0.7:
        tokens: Any = [rng.randrange(3) for _ in range(count)]
        found[0] = rng.choice([tokens, tuple(tokens), np.array(tokens, rng.choice(["int32", "int64"]))])
        found[1] = rng.random() < 0.1
    if verb == "remove" and rng.random() < 0.9:
        found = [rng.choice([requests[: rng.randrange(3)], requests[:1] * 2, [object()], (r for r in requests[:1])])]
    return found if rng.random() < 0.97 else [*found, Endless(rng)]


def test_wrong_arguments_of_rows_raise_and_change_nothing(rng: random.Random, fuzz_seconds: float) -> None:
    stop, num_refused, num_steps = time.monotonic() + fuzz_seconds / 2, 0, 0
    while time.monotonic() < stop:
        pool = Native(NUM_BLOCKS, None, 2)
        shape = layout(rng)
        told: list[Any] = []
        rows = make(pool, *shape, rng.choice([None, told.extend]), rng.choice([None, told.extend]))
        for _ in range(60):
            if rng.random() < 0.2:
                add(rng, rows, pool, len(shape[2]))
            if rng.random() < 0.2:
                with suppress(RuntimeError):  # somebody left
                    rows.serve()
            verb = rng.choice([*VERBS])
            before, arguments = state(rows, pool), given(rng, verb, rows)
            has_actor = any(isinstance(thing, Liar) or getattr(thing, "act", None) for thing in arguments)
            members = [own for row in range(len(rows.requests())) for own in rows.member(row)]
            has_actor |= any(getattr(own, "act", None) or not hasattr(own, "first_held") for own in members)
            try:
                answer = getattr(rows, verb)(*arguments)
                num_steps += verb == "step" and answer is not False
            except EXPECTED:
                num_refused += 1
                assert has_actor or state(rows, pool) == before, (verb, arguments)
            pool.check()
            assert np.asarray(rows.slot_mapping()).shape == (2, len(np.asarray(rows.lengths())))
            assert len(rows.requests()) == len(np.asarray(rows.lengths()))
    assert num_refused > 100
    assert num_steps > 30


def test_tables_are_read_before_they_are_counted() -> None:
    """A number that takes the other tables away while it is read."""
    pool = Native(50, None, 3)
    rows = make(pool, SIZE, False, [], [(0, False)], [], None, None)
    blocks: Any = pool.allocate(30)

    def act() -> None:
        del tables[1:]

    tables: Any = [[Liar(act), *blocks[1:10]], blocks[10:20], blocks[20:]]
    with pytest.raises(ValueError, match="a table for each group is needed"):
        joined_with(rows, tables)
    assert np.asarray(rows.lengths()).tolist() == []


def test_a_block_that_cannot_be_published_keeps_all_from_it() -> None:
    pool = Native(50, None, 2)
    rows = make(pool, SIZE, False, [], [(0, False), (1, False)], [], None, None)
    joined(rows, SIZE, [pool.allocate(1) or [], [40]])
    before = state(rows, pool)
    with pytest.raises(AssertionError, match="invariant 3: block 40 is committed, but nobody holds it"):
        rows.step([7], False)
    assert (state(rows, pool), pool.names(0), pool.names(1)) == (before, set(), set())


def joined_with(rows: _core.Rows, block_ids: Any) -> None:
    request, table = Thing(), table_of(block_ids, [])
    rows.add(request, table, None, [1] * SIZE, block_ids, [], 3, None, [1] * SIZE, bytes(32), None, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        (None, 4, False, [], [], [], None, None),
        ("pool", 0, False, [], [], [], None, None),
        ("pool", 2**40, False, [], [], [], None, None),
        ("pool", 4, False, [(0, 0, [0])], [], [], None, None),
        ("pool", 4, False, [(5, 0, [2])], [], [], None, None),
        ("pool", 4, False, [(5, -1, [1])], [], [], None, None),
        ("pool", 4, False, [(5,)], [], [], None, None),
        ("pool", 4, False, [], [(2, False)], [], None, None),
        ("pool", 4, False, [], [(0, True)], [], None, None),
        ("pool", 4, False, [], [], [4], None, None),
        ("pool", 4, False, 7, [], [], None, None),
    ],
)
def test_what_cannot_be_rows_is_refused(wrong: tuple[Any, ...]) -> None:
    pool = Native(5, None, 2)
    with pytest.raises(EXPECTED):
        make(*[pool if part == "pool" else part for part in wrong])


def test_a_view_is_read_only() -> None:
    rows = _core.Rows(Native(5, None, 2), 4, False, [], [], [], None, None)
    view: Any = rows.lengths()
    with pytest.raises(BufferError, match="it can only be read"):
        hashlib.sha256(view)  # asks for a plain row of bytes
    with pytest.raises(TypeError, match="cannot create"):
        _core.View()


def test_who_is_told_may_step_again() -> None:
    told: list[tuple[int, ...]] = []

    def on_stored(events: list[Any]) -> None:
        told.extend(event.token_ids for event in events)
        for token in range(SIZE if len(told) < 4 else 0):
            assert rows.step([10 * len(told) + token], False) is not False

    pool = Native(9, None, 2)
    rows = make(pool, SIZE, False, [], [(0, False)], [], on_stored, None)
    blocks: Any = pool.allocate(2)
    request = Thing()
    table = table_of([blocks[:1], blocks[1:]], [])
    rows.add(request, table, None, [1, 2, 3, 4], table.block_ids, [], 3, None, [1, 2, 3, 4], bytes(32), None, 0)  # type: ignore[attr-defined]
    assert rows.step([9], False) is not False
    assert told == [(1, 2, 3, 4), (9, 10, 11, 12), (13, 20, 21, 22), (23, 30, 31, 32)]
    assert np.asarray(rows.lengths()).tolist() == [SIZE + 1 + 3 * SIZE]
    pool.check()
