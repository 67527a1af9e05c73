"""The first hashing of a process, and hashing on several threads at the same time, give the same names.

Each test runs in a fresh process, where nothing was hashed yet, and with threads that take turns very often.
"""

import subprocess
import sys

import pytest

PROLOGUE = r"""
import hashlib
import sys
import threading
from kvpool import BlockHasher, Request
from kvpool.core.hashing import cbor

sys.setswitchinterval(1e-6)

def first_name(hasher, tokens):
    tokens = cbor(tuple(tokens[: hasher.block_size]))
    return hashlib.sha256(b"\x83\x58\x20" + hasher.root + tokens + b"\xf6").digest()

def at_once(calls):
    barrier = threading.Barrier(len(calls))
    results = [None] * len(calls)
    def run(index):
        barrier.wait()
        results[index] = calls[index]()
    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
"""

FIRST_USE_OF_A_VOCABULARY = """
hasher = BlockHasher(16)
prompts = [range(100_000 * k - 160, 100_000 * k) for k in (1, 2, 3, 4)]
for prompt, names in zip(prompts, at_once([lambda prompt=prompt: hasher.names(prompt) for prompt in prompts])):
    assert names == hasher.names(prompt)
    assert names[0] == first_name(hasher, prompt)
"""

BORDERS_OF_THE_VOCABULARY = """
hasher = BlockHasher(1)
for token in [2**bits + more for bits in range(1, 40) for more in (-1, 0)]:
    assert hasher.names([token]) == [first_name(hasher, [token])], token
"""

ONE_REQUEST_ASKED_TWICE = """
hasher = BlockHasher(1)
for _ in range(100):
    request = Request("r", range(200))
    at_once([lambda: request.block_hashes(hasher)] * 2)
    assert request.block_hashes(hasher) == hasher.names(range(200)), len(request.block_hashes(hasher))
"""


@pytest.mark.parametrize(
    "program",
    [FIRST_USE_OF_A_VOCABULARY, BORDERS_OF_THE_VOCABULARY, ONE_REQUEST_ASKED_TWICE],
    ids=["first use of a vocabulary", "borders of the vocabulary", "one request"],
)
def test_names_are_right_whoever_asks_at_the_same_time(program: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROLOGUE + program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
