"""Two hundred clients at once that cancel, go away and wait for nothing: every request ends and nothing leaks."""

import asyncio
import gc
import itertools
import json
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
import pytest
from tests.serving.served import MODEL, Running, eventually, running
from tests.serving.toy import FailingWorker, ToyWorker, continued

from kvpool import KVCacheManager
from kvpool.engine.generation import Generation
from kvpool.errors import WorkerDied
from kvpool.serving.call import Call
from kvpool.serving.choice import Choice
from kvpool.serving.stream import Stream

NUM_CLIENTS = 200
LEAST_REQUESTS = 2
Body: TypeAlias = dict[str, Any]
SHARED = "a beginning that many have in common, of some length; "
MAX_NUM_SEQS = 48
MOST_GROWTH = 10_000
"""Objects. asyncio keeps up to 100 timers that were called off, with the connections that they were for."""


@dataclass
class Tally:
    """How requests ended."""

    whole: int = 0
    streamed: int = 0
    gone: int = 0
    refused: int = 0
    failed: int = 0


async def one_request(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    """A request of some kind; some clients go away before its end."""
    prompt = SHARED * rng.randint(0, 2) + "".join(rng.choices("abc", k=rng.randint(1, 30)))
    num_tokens = rng.randint(1, 25)
    body: Body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "n": rng.choice([1, 1, 1, 3]),
    }
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("defg") + rng.choice("hijk")]
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice("xyz")
    expected = continued(prompt, num_tokens)
    if rng.random() < 0.5:
        await _streamed(http, rng, body, expected, tally)
    else:
        await _whole(http, rng, body, expected, tally)


async def _whole(http: httpx.AsyncClient, rng: random.Random, body: Body, expected: str, tally: Tally) -> None:
    asking = asyncio.create_task(http.post("/v1/completions", json=body))
    if rng.random() < 0.3:
        await asyncio.sleep(rng.random() * 0.1)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        tally.gone += 1
        return
    answer = await asking
    if answer.status_code == 200:
        assert all(expected.startswith(choice["text"]) for choice in answer.json()["choices"])
        tally.whole += 1
    elif answer.status_code == 429:
        tally.refused += 1
    else:
        assert answer.status_code == 503, answer.text
        tally.failed += 1


async def _streamed(http: httpx.AsyncClient, rng: random.Random, body: Body, expected: str, tally: Tally) -> None:
    num_events = rng.randint(0, 10) if rng.random() < 0.4 else 1_000_000
    texts: dict[int, str] = {}
    last = ""
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            assert answer.status_code == 429
            tally.refused += 1
            return
        async for line in answer.aiter_lines():
            last = line or last
            choices = json.loads(line.removeprefix("data: ")).get("choices", ()) if line.startswith("data: {") else ()
            for choice in choices:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            num_events -= 1
            if num_events < 0:
                tally.gone += 1
                break
        else:
            assert last == "data: [DONE]"
            tally.streamed += 1
    assert all(expected.startswith(text) for text in texts.values())


async def client(http: httpx.AsyncClient, seed: int, until_s: float, tally: Tally) -> None:
    rng = random.Random(seed)
    for number in itertools.count():
        if number >= LEAST_REQUESTS and time.monotonic() >= until_s:
            return
        await one_request(http, rng, tally)


async def clients(url: str, seed: int, seconds: float) -> Tally:
    tally = Tally()
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(client(http, seed + at, until_s, tally) for at in range(NUM_CLIENTS)))
    return tally


def drive(served: Running, seed: int, seconds: float) -> Tally:
    """All requests of all clients; then the server is idle, and holds no block."""
    tally = asyncio.run(clients(served.url, seed, seconds))
    eventually(lambda: served.engine.num_streams == 0)
    eventually(lambda: served.cache.num_live_requests == 0)
    assert served.cache.num_free_blocks == served.cache.num_usable_blocks
    return tally


def test_two_hundred_clients(seed: int, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # What is logged is kept by pytest, with all that led to it.
    seconds = 60.0 if request.config.getoption("--deep") else 5.0
    cache = KVCacheManager(400, 4, events=False)
    deaths = {number: WorkerDied("killed") for number in range(50, 100_000, 400)}
    failures = {number: RuntimeError("no memory") for number in range(200, 100_000, 400)}
    worker = FailingWorker(ToyWorker(cache), {**deaths, **failures})
    with running(worker, cache, max_num_seqs=MAX_NUM_SEQS, max_waiting=150) as served:
        tally = drive(served, seed, seconds / 2)
        before = num_objects()
        more = drive(served, seed + NUM_CLIENTS, seconds / 2)
        growth = num_objects() - before
    assert min(tally.whole, tally.streamed, tally.gone) > 0, tally
    assert more.whole > 0, more
    assert growth < MOST_GROWTH, f"{growth} objects more after {more}"


def num_objects() -> int:
    """All that lives in this process, the server included. Nothing of a request does, but in the last step."""
    gc.collect()
    objects = gc.get_objects()
    assert [each for each in objects if type(each) in {Stream, Call, Choice}] == []
    assert sum(type(each) is Generation for each in objects) <= MAX_NUM_SEQS
    return len(objects)
