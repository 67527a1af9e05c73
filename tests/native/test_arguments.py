"""Whatever the binding is given from outside, there is an answer or an exception, and no half-done change."""

import array
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import ConfigError
from kvpool._native import NativeBlockPool
from kvpool.core.block_pool import Lineage
from kvpool.events import EventLog

if NativeBlockPool is None:
    pytest.skip("the native core is not built, or KVPOOL_NATIVE is 0", allow_module_level=True)

from kvpool._native import _core
from kvpool._native.pool import NativeBlockPool as Native

NUM_BLOCKS = 24
ROOT = bytes(32)
EXPECTED = (TypeError, ValueError, IndexError, OverflowError, AssertionError, BufferError, AttributeError, RuntimeError)


class Liar:
    """Says that it is a number, and does something else first."""

    def __init__(self, act: Callable[[], object], value: object = 1) -> None:
        self.act, self.value = act, value

    def __index__(self) -> Any:
        self.act()
        return self.value


class Endless:
    """Longer than it says, or an error in the middle."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[object]:
        for _ in range(self.rng.randrange(9)):
            yield self.rng.randrange(NUM_BLOCKS)
        raise RuntimeError("no more")


def state(pool: Native) -> tuple[object, ...]:
    """All that can be seen of a pool."""
    blocks = range(NUM_BLOCKS)
    each = [(pool.holders(block), pool.name(block), pool.group_id(block)) for block in blocks]
    counts = (pool.num_free, pool.num_cached, pool.num_evictions)
    return pool.free_block_ids(), each, [pool.names(group) for group in range(2)], counts


def number(rng: random.Random) -> Any:
    edges = [
        -1,
        0,
        1,
        NUM_BLOCKS - 1,
        NUM_BLOCKS,
        2**31 - 1,
        2**31,
        2**32,
        2**63 - 1,
        2**63,
        2**64,
        -(2**31),
        -(2**63),
        10**30,
    ]
    return rng.choice([rng.choice(edges), rng.randrange(NUM_BLOCKS), rng.randrange(NUM_BLOCKS), True, 1.5, "1", None])


def name(rng: random.Random) -> Any:
    kinds: list[Any] = [
        rng.randrange(6).to_bytes(32, "big"),
        rng.randbytes(rng.randrange(40)),
        rng.randrange(5),
        b"",
        -3,
    ]
    return rng.choice([*kinds, *kinds, number(rng), bytearray(32), "name", (1,), np.int64(3)])


def several(rng: random.Random, one: Callable[[random.Random], Any]) -> Any:
    items = [one(rng) for _ in range(rng.choice([0, 1, 2, 3, 9]))]
    return rng.choice([items, items, tuple(items), iter(items), Endless(rng), {1: 2}, 7, None, "text"])


def ids(rng: random.Random) -> Any:
    few = [
        rng.randrange(-2, NUM_BLOCKS + 2) if rng.random() < 0.1 else rng.randrange(NUM_BLOCKS)
        for _ in range(rng.randrange(7))
    ]
    dtypes = ["int32", "int64", "int32", "int64", "uint32", "int16", "float64", ">i4", ">i8", "bool"]
    row = np.array([block % 100 for block in few], rng.choice(dtypes)) if rng.random() < 0.8 else np.array(few, "int64")
    odd: list[Any] = [
        row[::2],
        row.reshape(1, -1),
        memoryview(row.tobytes()),
        array.array("i", few),
        array.array("q", few),
        b"1234",
    ]
    growing: list[Any] = [1, 2, 3]
    growing[1] = Liar(growing.clear)
    unaligned = np.frombuffer(b"\0" + bytes(row.astype("int32")), "int32", offset=1)
    frozen = row.copy()
    frozen.flags.writeable = False
    return rng.choice([few, few, few, row, row, frozen, unaligned, *odd, growing, several(rng, number)])


def names(rng: random.Random) -> Any:
    row = rng.randbytes(rng.choice([0, 31, 32, 33, 64, 96]))
    rows: list[Any] = [row, bytearray(row), memoryview(row), np.frombuffer(row, np.uint8), np.zeros(8, np.int32)]
    good = [rng.randrange(6).to_bytes(32, "big") for _ in range(rng.randrange(5))]
    return rng.choice([good, good, b"".join(good), *rows, several(rng, name)])


def parents(rng: random.Random) -> Any:
    lineage = Lineage(rng.choice([None, b"x"]), [(b"y", 1)], rng.choice([None, ROOT]), 3)
    return rng.choice([None, names(rng), [None, lineage], [lineage], [object()], several(rng, name)])


def room(rng: random.Random) -> Any:
    return rng.choice([np.zeros(rng.randrange(6), np.int32), ids(rng)])


def bad(rng: random.Random) -> Any:
    known = {rng.randrange(6).to_bytes(32, "big"): rng.randrange(9)}
    key: Any = rng.choice([b"x", ROOT, 3, -1, 2**70, "name", bytes(33), None])
    return rng.choice([known, known, {}, {key: number(rng)}, [], None, "x"])


def ties(rng: random.Random) -> Any:
    tie = rng.choice([(0, 1, b"x", 2), (1, 3, ROOT, -9), (number(rng), number(rng), b"x", number(rng)), (1, 2), "tie"])
    return rng.choice([[], [tie], iter([tie]), None, several(rng, number)])


Part = Callable[[random.Random], Any]
VERBS: dict[str, tuple[Part, ...]] = {
    "holders": (number,),
    "name": (number,),
    "group_id": (number,),
    "has_lineage": (number,),
    "names": (number,),
    "was_evicted": (name, number),
    "match": (names, number),
    "match_into": (names, room, number),
    "finder": (number,),
    "carry": (ids, names, number),
    "num_idle": (ids,),
    "touch": (ids,),
    "allocate": (number,),
    "allocate_into": (room,),
    "commit": (ids, names, number, parents),
    "free": (ids,),
    "free_each": (ids,),
    "free_groups": (lambda rng: several(rng, ids),),
    "keep": (ids,),
    "clear": (),
    "check": (),
    "find_dependents": (bad, ties),
    "withdraw_dependents": (bad, ties),
}


def arguments(rng: random.Random, parts: tuple[Part, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = [part(rng) for part in parts]
    for at, part in enumerate(parts):
        if part is number and rng.random() < 0.7:
            given[at] = rng.randrange(2)
    if rng.random() < 0.03:
        given = given[: rng.randrange(len(given) + 1)] + [None] * rng.randrange(3)
    words = {"spare": ids(rng)} if parts == VERBS["commit"] and rng.random() < 0.5 else {}
    return tuple(given), {**words, **({"nothing": 1} if rng.random() < 0.01 else {})}


def make(rng: random.Random) -> Native:
    log = rng.choice([None, EventLog()])
    pool = Native(NUM_BLOCKS, log, 2, is_ranked=rng.random() < 0.5)
    blocks = pool.allocate(12)
    assert blocks is not None
    pool.commit(blocks[:6], [number.to_bytes(32, "big") for number in range(6)], rng.randrange(2))
    pool.free(blocks[:9])
    return pool


def refusal(pool: Native, verb: str, given: tuple[Any, ...], words: dict[str, Any]) -> Exception | None:
    """What the call raises, if it does."""
    try:
        answer = getattr(pool, verb)(*given, **words)
        if verb == "finder":
            answer(b"x")
    except EXPECTED as error:
        return error
    return None


def test_wrong_arguments_raise_and_change_nothing(rng: random.Random, fuzz_seconds: float) -> None:
    stop, num_refused, num_served = time.monotonic() + fuzz_seconds, 0, 0
    while time.monotonic() < stop:
        pool = make(rng)
        for _ in range(60):
            verb = rng.choice([*VERBS])
            given, words = arguments(rng, VERBS[verb])
            before = state(pool)
            error = refusal(pool, verb, given, words)
            num_served += error is None
            num_refused += error is not None
            assert error is None or state(pool) == before, (verb, given, words, error)
            pool.check()
    assert num_refused > 100
    assert num_served > 100


def test_wrong_arguments_of_hashing_raise_or_are_left_to_the_pure_core(rng: random.Random, fuzz_seconds: float) -> None:
    stop = time.monotonic() + fuzz_seconds / 3
    parent_like: Part = lambda rng: rng.choice([ROOT, ROOT, b"", b"x", 7, None])  # noqa: E731
    extras: Part = lambda rng: rng.choice([None, [], [b"x", None], [b""], [7], b"xy", 5, Endless(rng)])  # noqa: E731
    out: Part = lambda rng: rng.choice([bytearray(640), bytearray(3), bytes(640), np.zeros(99, np.int32), None])  # noqa: E731
    size: Part = lambda rng: rng.choice([1, 1, 2, 3, number(rng)])  # noqa: E731
    functions: dict[Callable[..., Any], tuple[Part, ...]] = {
        _core.hash_blocks: (ids, size, parent_like, extras),
        _core.hash_into: (ids, size, parent_like, out, extras),
        _core.hash_encoded: (parent_like, size, parent_like, parent_like),
        _core.encode_blocks: (ids,),
    }
    while time.monotonic() < stop:
        function = rng.choice([*functions])
        try:
            function(*[part(rng) for part in functions[function]])
        except EXPECTED:
            continue


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((), TypeError),
        ((1,), TypeError),
        ((1, 1, False, None, {}), ConfigError),
        ((2**31, 1, False, None, {}), ConfigError),
        ((5, 0, False, None, {}), ConfigError),
        ((5, 257, False, None, {}), ConfigError),
        ((10**30, 1, False, None, {}), OverflowError),
        ((5, 1, False, None, None), TypeError),
        (("5", 1, False, None, {}), TypeError),
    ],
)
def test_what_cannot_be_a_pool_is_refused(given: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        _core.Pool(*given)


def test_names_in_a_row_have_32_bytes_each() -> None:
    with pytest.raises(ValueError, match="names have 32 bytes each: 33 are not so many"):
        Native(5).match(bytes(33))


def test_results_are_not_written_to_what_is_read_only() -> None:
    pool, room_ = Native(5), np.zeros(2, np.int32)
    room_.flags.writeable = False
    for call in (pool.allocate_into, lambda out: pool.match_into([], out)):
        with pytest.raises((BufferError, ValueError)):
            call(room_)
    assert pool.num_free == 4


def test_a_prefix_is_looked_up_no_further_than_it_goes() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x"

    pool = Native(5)
    assert pool.match(endless()) == []
    assert pool.match([b"x"] * 200 + [None]) == []  # type: ignore[list-item]


def test_heads_follow_lines_that_are_there() -> None:
    lines, heads = np.zeros((3, 16), np.int32), np.array([0, 1], np.int32)
    lines[:, 0] = 1, 2, 0
    _core.follow(lines, heads, 2)
    assert heads.tolist() == [2, 0]
    for number_ in (3, -1):
        heads[1] = number_
        with pytest.raises(IndexError, match=f"there is no line {number_}"):
            _core.follow(lines, heads, 1)
    with pytest.raises(TypeError, match="lines are an array of int32"):
        _core.follow(lines.astype(np.int64), heads, 1)
