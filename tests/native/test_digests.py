"""Native names are the pure ones, and those of cbor2 and hashlib."""

import random
from hashlib import sha256
from typing import Any

import cbor2
import numpy as np
import pytest

from kvpool import BlockHasher
from kvpool._native import hash_blocks
from kvpool.core.hashing import cbor

pytestmark = pytest.mark.skipif(hash_blocks is None, reason="the native core does not hash here")

EXTRA_KEYS: list[Any] = [None, (), ("salt",), (("lora", "x" * 70, 3),), (b"\xff" * 300, -5), (2**63, ("mm", "å", -1))]
MOST = (24, 256, 70_000, 1 << 31, 1 << 32, 1 << 33, 1 << 63)


def expected(hasher: BlockHasher, tokens: list[int], keys: list[Any], parent: bytes) -> list[bytes]:
    """What cbor2 and hashlib make of it."""
    names, size = [], hasher.block_size
    for index in range(len(tokens) // size):
        extra = keys[index] if index < len(keys) else None
        block = (parent, tokens[index * size : (index + 1) * size], extra or None)
        parent = sha256(cbor2.dumps(block, canonical=True)).digest()
        names.append(parent)
    return names


def compare(rng: random.Random, num_blocks: int) -> None:
    """Random runs of blocks of many sizes, with and without extra keys, as lists and arrays."""
    done = 0
    while done < num_blocks:
        hasher = BlockHasher(rng.choice([1, 4, 15, 16, 17, 23, 24, 64, 256, 300]))
        most, count = rng.choice(MOST), rng.choice([0, 1, 5, 40, 100])
        tokens = [rng.randrange(rng.choice([24, most])) for _ in range(count * hasher.block_size + rng.randrange(9))]
        keys = rng.choice([[], rng.choices(EXTRA_KEYS, k=rng.randint(0, count + 2))])
        parent = rng.randbytes(32)
        names = hasher.names(tokens, parent, keys)
        assert names == hasher._pure_names(tokens, parent, [cbor(each) if each else None for each in keys])
        assert names == expected(hasher, tokens, keys, parent)
        for dtype in (np.int32, np.int64) if most <= 1 << 31 else (np.int64,):
            assert hasher.names(np.array(tokens, dtype), parent, keys) == names
        done += len(names)


def test_names_are_those_of_the_pure_core_and_of_cbor2(rng: random.Random) -> None:
    compare(rng, 20_000)


@pytest.mark.deep
def test_a_million_names_are(rng: random.Random) -> None:
    compare(rng, 1_000_000)


def test_encoded_blocks_are_the_same(rng: random.Random) -> None:
    hasher = BlockHasher(16)
    for most in MOST:
        blocks = np.array([[rng.randrange(most) for _ in range(16)] for _ in range(60)], np.int64)
        encoded = hasher.encode(blocks)
        assert encoded == hasher._pure_encode(blocks) == hasher.encode(np.asfortranarray(blocks))
        names = [hasher.name(code, None, None) for code in encoded]
        assert names == [hasher.names(block)[0] for block in blocks.tolist()]


def test_arrays_that_are_no_token_ids_of_32_bits_are_hashed_all_the_same() -> None:
    hasher = BlockHasher(4)
    names = hasher.names([*range(12)])
    for dtype in (np.uint8, np.int16, np.uint32, np.uint64, ">i4"):
        assert hasher.names(np.arange(12, dtype=dtype)) == names
    assert hasher.names(np.arange(24)[::2]) == hasher.names([*range(0, 24, 2)])
