"""Whatever the rows of a decode batch are given from outside, there is an answer or an exception."""

import hashlib
import random
import time
from typing import Any

import numpy as np
import pytest

from kvpool._native import NativeBlockPool

if NativeBlockPool is None:
    pytest.skip("the native core is not built, or KVPOOL_NATIVE is 0", allow_module_level=True)

from tests.native.test_arguments import EXPECTED, NUM_BLOCKS, Endless, Liar, Part, ids, name, number, several

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


def add(rng: random.Random, rows: _core.Rows, pool: Native) -> None:
    """A row as a cache makes it."""
    count = rng.randint(1, 2)
    blocks = pool.allocate(2 * count)
    if blocks is None:
        return
    length = SIZE * (count - 1) + rng.randint(1, SIZE + 1)
    held = np.zeros(len(rows_windows[id(rows)]), np.int32)
    rows.add(length, rng.choice([None, length + 9]), [blocks[:count], blocks[count:]], held)
    tail = length % SIZE or SIZE
    plain_from = rng.choice([0, 0, 0, 2**63 - 1])
    row = len(np.asarray(rows.lengths())) - 1
    rows.follow(row, [rng.randrange(3)] * tail, bytes(32), rng.choice([None, b"\x80"]), plain_from)


rows_windows: dict[int, list[Any]] = {}
VERBS: dict[str, tuple[Part, ...]] = {
    "add": (number, number, lambda rng: several(rng, ids), ids),
    "follow": (number, ids, name, lambda rng: rng.choice([None, b"x", 7]), number),
    "remove": (ids,),
    "step": (ids, ids, number),
    "serve": (ids,),
    "news": (number,),
    "block_tables": (number,),
}


def given(rng: random.Random, verb: str, rows: _core.Rows) -> list[Any]:
    count = len(np.asarray(rows.lengths()))
    found = [part(rng) for part in VERBS[verb]]
    if rng.random() < 0.3:
        found[0] = Liar(lambda: rows.remove(range(count // 2)), rng.randrange(3))
    if verb == "step" and rng.random() < 0.7:
        tokens: Any = [rng.randrange(3) for _ in range(count)]
        found = [
            rng.choice([tokens, tuple(tokens), np.array(tokens, rng.choice(["int32", "int64"]))]),
            [object() for _ in range(count if rng.random() < 0.9 else rng.randrange(count + 3))],
            rng.random() < 0.1,
        ]
    if verb == "remove" and rng.random() < 0.9:
        found = [[rng.randrange(-1, count + 1)]]
    return found if rng.random() < 0.97 else [*found, Endless(rng)]


def test_wrong_arguments_of_rows_raise_and_change_nothing(rng: random.Random, fuzz_seconds: float) -> None:
    stop, num_refused, num_steps = time.monotonic() + fuzz_seconds / 2, 0, 0
    while time.monotonic() < stop:
        pool = Native(NUM_BLOCKS, None, 2)
        shape = layout(rng)
        told: list[Any] = []
        rows = make(pool, *shape, rng.choice([None, told.extend]), rng.choice([None, told.extend]))
        rows_windows[id(rows)] = shape[2]
        for _ in range(60):
            if rng.random() < 0.2:
                add(rng, rows, pool)
            if rng.random() < 0.2:
                rows.serve([object()] * len(np.asarray(rows.lengths())))
            verb = rng.choice([*VERBS])
            before, arguments = state(rows, pool), given(rng, verb, rows)
            has_liar = any(isinstance(argument, Liar) for argument in arguments)
            try:
                answer = getattr(rows, verb)(*arguments)
                num_steps += verb == "step" and answer is not False
            except EXPECTED:
                num_refused += 1
                assert has_liar or verb == "step" or state(rows, pool) == before, (verb, arguments)
            pool.check()
            assert np.asarray(rows.slot_mapping()).shape == (2, len(np.asarray(rows.lengths())))
        rows_windows.clear()
    assert num_refused > 100
    assert num_steps > 30


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
    rows.add(SIZE, None, [pool.allocate(1), pool.allocate(1)], [])
    rows.follow(0, [1, 2, 3, 4], bytes(32), None, 0)
    assert rows.step([9], False) is not False
    assert told == [(1, 2, 3, 4), (9, 10, 11, 12), (13, 20, 21, 22), (23, 30, 31, 32)]
    assert np.asarray(rows.lengths()).tolist() == [SIZE + 1 + 3 * SIZE]
    pool.check()
