"""The app on a socket: serves until it is told to stop, then lets requests end for a while.

Knows nothing of: what is served.
"""

import asyncio
import socket

from kvpool.errors import MissingExtraError
from kvpool.serving.app import ServerConfig, make_app
from kvpool.serving.async_engine import AsyncEngine
from kvpool.serving.tokenizer import Tokenizer

try:
    import uvicorn
except ImportError as error:
    raise MissingExtraError("uvicorn", "serve") from error

_GOODBYE_S = 5
_KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep idle connections, so that they close them and not we."""


class Server(uvicorn.Server):
    """uvicorn that stops in order: no new requests, time to end for those that run, then what is left is told so."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        config: ServerConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
    ) -> None:
        self._engine = engine
        self._drain_s = config.drain_s
        super().__init__(
            uvicorn.Config(
                make_app(engine, tokenizer, config),
                host=host,
                port=port,
                log_level="warning",
                lifespan="on",
                timeout_graceful_shutdown=int(config.drain_s) + _GOODBYE_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._engine.stop(self._drain_s))
        await super().shutdown(sockets)
        await draining
