"""A real server on a free port, on a thread of the test's own process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from openai import OpenAI
from tests.serving.toy import ByteTokenizer, ToyWorker

from kvpool import KVCacheManager
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.engine.step_input import Worker
from kvpool.serving.app import ServerConfig
from kvpool.serving.async_engine import AsyncEngine
from kvpool.serving.engine_loop import EngineLoop
from kvpool.serving.server import Server
from kvpool.serving.tokenizer import Tokenizer

MODEL = "toy"


@dataclass
class Running:
    """A server that serves, and what it is made of."""

    url: str
    cache: KVCacheManager
    engine: AsyncEngine
    server: Server

    def client(self, **keywords: object) -> OpenAI:
        """OpenAI's own client."""
        settings: dict[str, object] = {"api_key": "none", "max_retries": 0, "timeout": 60, **keywords}
        return OpenAI(base_url=f"{self.url}/v1", **settings)  # type: ignore[arg-type]

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)


@contextmanager
def running(
    worker: Worker | None = None,
    cache: KVCacheManager | None = None,
    *,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 256,
    max_waiting: int = 1024,
    max_model_len: int | None = None,
    config: ServerConfig | None = None,
    tokenizer: Tokenizer | None = None,
) -> Iterator[Running]:
    """Serve until the end of the block; then all blocks must be free and the bookkeeping right."""
    cache = cache or KVCacheManager(512, 4)
    loop = EngineLoop(
        cache, worker or ToyWorker(cache), SchedulerConfig(max_num_batched_tokens, max_num_seqs, waits_for_prefix=True)
    )
    engine = AsyncEngine(loop, max_model_len=max_model_len, max_waiting=max_waiting)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = Server(engine, tokenizer or ByteTokenizer(), config or ServerConfig(MODEL))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        try:
            _until_healthy(f"http://127.0.0.1:{port}", thread)
            yield Running(f"http://127.0.0.1:{port}", cache, engine, server)
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive(), "the server does not stop"
    cache.check()
    assert cache.num_live_requests == 0
    assert cache.num_free_blocks == cache.num_usable_blocks
    assert engine.num_waiting == 0


def eventually(is_so: Callable[[], bool]) -> None:
    """Wait for what comes sooner or later; the test's own end is the limit."""
    while not is_so():
        time.sleep(0.005)


def _until_healthy(url: str, thread: threading.Thread) -> None:
    while thread.is_alive():
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            continue
    raise AssertionError("the server did not start")
