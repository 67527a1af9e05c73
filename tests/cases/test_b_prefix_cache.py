"""Cases of group B: which prompts share a prefix, and which must not."""
# ruff: noqa: N802

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvpool import Adapter, BlockHasher, KVCacheManager, MediaItem, PromptEmbeds, Request
from kvpool.engine.scheduler import Scheduler
from kvpool.testing import serve

_NAMES_OF_40_TOKENS = """
import json
from kvpool import BlockHasher
hasher = BlockHasher(16)
for keys in ([None, None], [(), ()]):
    print(json.dumps([name.hex() for name in hasher.names(range(40), None, keys)]))
"""


def test_B01_an_adapter_is_its_name_and_its_id_and_no_salt() -> None:
    """Unloading an adapter needs no call: no request can ask for its names any more, and they age out."""
    cache = KVCacheManager(30, 4)
    tokens = list(range(1, 10))
    first, second, salted = Adapter("a", "1"), Adapter("a", "2"), Adapter("S", "3")
    requests = [
        Request("R1", tokens, adapter=first),
        Request("R2", tokens, adapter=second),
        Request("R3", tokens, cache_salt="S"),
        Request("R4", tokens, adapter=salted),
        Request("R5", tokens),
        Request("R6", tokens, adapter=first),
    ]
    assert [serve(cache, request).num_tokens for request in requests] == [0, 0, 0, 0, 0, 8]
    names = {name for request in requests for name in request.block_hashes(cache.hasher)}
    assert len(names) == 10
    cache.check()


def test_B03_pictures_whose_digests_differ_above_the_low_16_bits_share_nothing() -> None:
    """Digests are used whole: of two pictures with equal low bits neither finds the other's blocks."""
    cache = KVCacheManager(30, 16)
    one, other = _digest(0xBEEF), _digest(0x1_BEEF)
    assert one[-4:] == other[-4:]
    pictures = [("R1", one), ("R2", other), ("R3", one), ("R4", other)]
    requests = [Request(name, [9] * 32 + [1], media=[MediaItem(digest, 0, 32)]) for name, digest in pictures]
    assert [serve(cache, request).num_tokens for request in requests] == [0, 0, 32, 32]
    names = {name for request in requests for name in request.block_hashes(cache.hasher)}
    assert len(names) == 4
    cache.check()


def test_B03_every_bit_of_a_digest_enters_every_block_that_the_picture_touches() -> None:
    """One block of text, then a picture that begins and ends within a block, then text that follows from it."""
    hasher = BlockHasher(16)

    def names(digest: int) -> list[bytes]:
        media = [MediaItem(_digest(digest), 20, 30)]
        return Request("R", [*range(20), *[9] * 30, *range(14)], media=media).block_hashes(hasher)

    text, *blocks = zip(names(0), *(names(1 << bit) for bit in range(256)), strict=True)
    assert len(set(text)) == 1
    assert [len(set(block)) for block in blocks] == [257, 257, 257]
    # Each of them has the digest in its own key, not only through its parent.
    keys = [None, *((("mm", _digest(1), offset),) for offset in (4, -12, -28))]
    assert names(1) == hasher.names([*range(20), *[9] * 30, *range(14)], extra_keys=keys)


def test_B03_sixteen_bits_clash_after_302_pictures() -> None:
    """The birthday problem, and what is left of it with a digest of 128 bits or more."""

    def chance(num_pictures: int, num_bits: int) -> float:
        return 1.0 - math.prod([1.0 - i / 2.0**num_bits for i in range(num_pictures)])

    assert chance(301, 16) < 0.5 < chance(302, 16)
    assert f"{chance(1_000, 16):.2%}" == "99.95%"
    assert chance(1_000_000, 128) == 0.0  # below what a float can tell from 0


def _digest(number: int) -> str:
    """A digest of 256 bits."""
    return f"{number:064x}"


def _with_rows(name: str, is_embedded: Sequence[bool], rows: npt.NDArray[np.float32]) -> Request:
    return Request(name, range(9), prompt_embeds=PromptEmbeds(rows, np.array(is_embedded)))


def test_B04_the_choice_between_ids_and_rows_is_part_of_the_name() -> None:
    """The same ids and rows, once all embedded and once with the first block as ids; then the ids alone."""
    cache = KVCacheManager(30, 4)
    rows = np.arange(18, dtype=np.float32).reshape(9, 2)
    all_rows, mixed = [True] * 9, [False] * 4 + [True] * 5
    requests = [
        _with_rows("A", all_rows, rows),
        _with_rows("B", mixed, rows),
        _with_rows("A again", all_rows, rows),
        Request("T", range(9)),
    ]
    assert [serve(cache, request).num_tokens for request in requests] == [0, 0, 8, 0]
    a, b, again, text = (request.block_hashes(cache.hasher) for request in requests)
    assert again == a
    assert len({*a, *b, *text}) == 6
    assert cache.match(_with_rows("B again", mixed, rows)).num_tokens == 8
    assert cache.match(Request("T again", range(9))).num_tokens == 8
    cache.check()


def test_B04_text_has_the_names_that_it_has_without_rows() -> None:
    """The names of a prompt of ids alone are those of its tokens, as they were before prompts could have rows."""
    hasher = BlockHasher(4)
    names = Request("T", range(9)).block_hashes(hasher)
    assert names == hasher.names(range(9))
    # Computed outside of the library: canonical CBOR of [root, tokens, null].
    root = sha256(b"\x6e" + b"vllm-none-hash").digest()
    assert names[0] == sha256(b"\x83\x58\x20" + root + b"\x84\x00\x01\x02\x03" + b"\xf6").digest()


def test_B04_only_what_is_taken_counts_and_all_of_it() -> None:
    """Any other choice is another input, even among equal rows; a row that is not taken is none."""
    hasher = BlockHasher(4)
    rows = np.arange(18, dtype=np.float32).reshape(9, 2)
    alike = np.zeros_like(rows)
    choices = list(itertools.product([False, True], repeat=8))
    all_names = {tuple(_with_rows("R", [*choice, True], alike).block_hashes(hasher)) for choice in choices}
    assert len(all_names) == 2**8
    assert len({name for names in all_names for name in names}) == 2**4 + 2**8

    mixed = [False, True] * 4 + [False]
    names = _with_rows("R", mixed, rows).block_hashes(hasher)
    for position, is_taken in enumerate(mixed[:8]):
        changed = rows.copy()
        changed[position, 1] += 1
        others = _with_rows("R", mixed, changed).block_hashes(hasher)
        assert [name != other for name, other in zip(names, others, strict=True)] == [
            is_taken and position < 4,
            is_taken,
        ]


def _names_in_a_fresh_process(hash_seed: str) -> list[list[str]]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", _NAMES_OF_40_TOKENS], env=environment, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_B05_names_are_the_same_in_every_process() -> None:
    """That a store refuses names of another seed comes with the stores."""
    one, other = _names_in_a_fresh_process("1"), _names_in_a_fresh_process("4242")
    assert one == other
    without, empty = one
    assert without == empty == [name.hex() for name in BlockHasher(16).names(range(40))]
    assert len(without) == 2
    assert not {bytes.fromhex(name) for name in without} & set(BlockHasher(16, seed="other").names(range(40)))
    assert BlockHasher(16, seed="other").root != BlockHasher(16).root


def test_B09_requests_that_do_not_read_the_cache_still_fill_it() -> None:
    cache = KVCacheManager(60, 16)
    scheduler = Scheduler(cache)
    prompts = [[*range(54), *range(1000 * n, 1000 * n + n - 54)] for n in (55, 56, 57)]
    pooling = [Request(f"pool-{len(p)}", p, reads_cache=False, max_tokens=1) for p in prompts]
    assert [_num_computed(scheduler, request) for request in pooling] == [55, 56, 57]
    assert cache.stats.num_requests == 0
    ordinary = Request("ordinary", [*range(54), 1, 2, 3], max_tokens=1)
    assert _num_computed(scheduler, ordinary) == 57 - 48
    stats = cache.stats
    assert (stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens) == (1, 57, 48)


def _num_computed(scheduler: Scheduler, request: Request) -> int:
    """How many positions of the prompt are computed, and so give an output."""
    scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduler.commit(batch, [0]) == [request]
    return batch.counts[0]
