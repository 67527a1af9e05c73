"""The names of blocks: the digests that vLLM calls `sha256_cbor`, byte for byte; never two inputs under one name."""

import json
import random
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import cbor2
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvpool import BlockHasher, ConfigError, UsageError
from kvpool.core.hashing import ExtraKey, cbor

VECTORS = json.loads((Path(__file__).parent / "hash_vectors.json").read_text())
INTEGERS = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
TEXTS = ["", "a", "lora", "naïve", "模型", "🦙" * 70, "x" * 300, "\x00", "é", "e\u0301"]
Keys = tuple[ExtraKey, ...]

KEYS = st.recursive(
    st.integers(-(2**64), 2**64 - 1) | st.text() | st.binary(), lambda inner: st.lists(inner).map(tuple), max_leaves=8
)


def expected_names(
    hasher: BlockHasher, tokens: Sequence[int], extra_keys: Sequence[Keys | None], parent: bytes | None = None
) -> list[bytes]:
    """What cbor2 and hashlib make of it."""
    name = parent or sha256(cbor2.dumps(hasher.seed, canonical=True)).digest()
    names, size = [], hasher.block_size
    for index in range(len(tokens) // size):
        keys = extra_keys[index] if index < len(extra_keys) else None
        block = (name, tuple(tokens[index * size : (index + 1) * size]), keys or None)
        name = sha256(cbor2.dumps(block, canonical=True)).digest()
        names.append(name)
    return names


def random_key(rng: random.Random) -> ExtraKey:
    values: list[ExtraKey] = [rng.choice(TEXTS), rng.choice(INTEGERS), -1 - rng.choice(INTEGERS), rng.randbytes(3)]
    values.append(("mm", rng.choice(TEXTS), rng.randrange(-2000, 2000)))
    return rng.choice(values)


def random_tokens(rng: random.Random) -> list[int]:
    most = rng.choice([24, 256, 70_000, 1 << 21, 1 << 40, 1 << 64])
    return [rng.randrange(most) for _ in range(rng.randrange(200))]


def test_names_equal_cbor2_and_hashlib_on_thousands_of_random_blocks(rng: random.Random) -> None:
    num_blocks = 0
    for _ in range(800):
        hasher = BlockHasher(rng.choice([1, 2, 3, 16, 23, 24, 64]), rng.choice(TEXTS))
        tokens = random_tokens(rng)
        keys = [
            rng.choice([None, (), tuple(random_key(rng) for _ in range(rng.randrange(5)))])
            for _ in range(rng.randrange(len(tokens) + 2))
        ]
        parent = rng.choice([None, rng.randbytes(32)])
        names = hasher.names(tokens, parent, keys)
        assert names == expected_names(hasher, tokens, keys, parent)
        num_blocks += len(names)
    assert num_blocks > 5_000


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_frozen_vectors(vector: dict[str, Any]) -> None:
    hasher = BlockHasher(vector["block_size"], vector["seed"])
    names = hasher.names(vector["token_ids"], None, [_as_tuples(keys) for keys in vector["extra_keys"]])
    assert [name.hex() for name in names] == vector["names"]


def _as_tuples(keys: Any) -> Any:
    return tuple(map(_as_tuples, keys)) if isinstance(keys, list) else keys


def test_published_values() -> None:
    assert BlockHasher(16).root.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    hasher = BlockHasher(16, seed="0")
    assert hasher.root.hex() == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    [name] = hasher.names(range(16))
    assert name.hex() == "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c"


def test_only_full_blocks_have_names() -> None:
    hasher = BlockHasher(4)
    assert [len(hasher.names(range(count))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert hasher.names(range(7)) == hasher.names(range(4))


def test_no_keys_and_empty_keys_are_the_same_but_an_empty_text_is_a_key() -> None:
    hasher = BlockHasher(2)
    plain = hasher.names([1, 2])
    assert hasher.names([1, 2], None, [None]) == hasher.names([1, 2], None, [()]) == plain
    assert hasher.names([1, 2], None, [("",)]) != plain


def test_every_input_of_a_name_counts() -> None:
    hasher = BlockHasher(2)
    names = [
        *hasher.names([1, 2]),
        *hasher.names([2, 1]),
        *hasher.names([1, 2], hasher.names([1, 2])[0]),
        *hasher.names([1, 2], None, [("s",)]),
        *hasher.names([1, 2], None, [(("s",),)]),
        *hasher.names([1, 2], None, [("s", "")]),
        *hasher.names([1, 2], None, [(b"s",)]),
        *hasher.names([1, 2], None, [("a", "b")]),
        *hasher.names([1, 2], None, [("b", "a")]),
        *hasher.names([1, 2], None, [("ab",)]),
        *BlockHasher(2, "other").names([1, 2]),
        *BlockHasher(1).names([1, 2]),
    ]
    assert len(set(names)) == len(names) == 13


def test_names_do_not_depend_on_how_the_tokens_are_cut(rng: random.Random) -> None:
    hasher = BlockHasher(4)
    for _ in range(200):
        tokens = random_tokens(rng)
        keys = [rng.choice([None, ("k", rng.randrange(9))]) for _ in range(len(tokens) // 4)]
        cut = rng.randint(0, len(keys))
        head = hasher.names(tokens[: 4 * cut], None, keys[:cut])
        tail = hasher.names(tokens[4 * cut :], head[-1] if head else None, keys[cut:])
        assert head + tail == hasher.names(tokens, None, keys)


@settings(max_examples=500, deadline=None)
@given(KEYS)
def test_encoding_is_canonical_and_can_be_read_back(value: ExtraKey) -> None:
    """What can be read back was not written like anything else."""
    assert cbor(value) == cbor2.dumps(value, canonical=True)
    assert _as_tuples(cbor2.loads(cbor(value))) == value


@settings(max_examples=500, deadline=None)
@given(KEYS, KEYS)
def test_two_values_never_encode_alike(one: ExtraKey, other: ExtraKey) -> None:
    assert (cbor(one) == cbor(other)) == (one == other)


def test_blocks_encoded_together_have_the_names_of_blocks_hashed_alone(rng: random.Random) -> None:
    hasher = BlockHasher(5)
    for most in (24, 256, 70_000, 1 << 20, 1 << 21, 1 << 62):
        blocks = [[rng.randrange(most) for _ in range(5)] for _ in range(50)]
        encoded = hasher.encode(np.array(blocks, dtype=np.int64))
        for block, code in zip(blocks, encoded, strict=True):
            parent, keys = rng.choice([None, rng.randbytes(32)]), rng.choice([None, (), (random_key(rng),)])
            assert [hasher.name(code, parent, keys)] == hasher.names(block, parent, [keys])
    assert hasher.encode(np.zeros((0, 5), dtype=np.int64)) == []


def test_hashers_of_equal_size_and_seed_are_equal() -> None:
    assert BlockHasher(16) == BlockHasher(16)
    assert BlockHasher(16) != BlockHasher(8)
    assert BlockHasher(16) != BlockHasher(16, "0")


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_holds_at_least_one_token(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size is {block_size}: a block holds at least 1 token"):
        BlockHasher(block_size)


@pytest.mark.parametrize(
    ("tokens", "keys", "message"),
    [
        ([1, -5], [], "token ids are 0 or more, not -5"),
        ([1, 2**64], [], "does not fit into 64 bits"),
        ([1, 2], [(2**64,)], "does not fit into 64 bits"),
        ([1, 2], [(-(2**64) - 1,)], "does not fit into 64 bits"),
        ([1, 2], [(1.5,)], "not 1.5"),
        ([1, 2], [(["a"],)], r"not \['a'\]"),
    ],
)
def test_what_has_no_name_is_refused(tokens: list[int], keys: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BlockHasher(2).names(tokens, None, keys)
