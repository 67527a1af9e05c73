"""A server for this program alone: on a Unix socket in a folder that nobody else may open, on a thread.

Owns: the folder and the thread.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvpool.errors import AbortedError
from kvpool.serving.server import Server

_STEP_S = 0.02
_STOP_S = 10.0


@contextmanager
def serving_here(server: Server) -> Iterator[Path]:
    """The path of the socket; requests that still run at the end are ended. AbortedError when it does not start."""
    with TemporaryDirectory(prefix="kvpool-") as folder, socket.socket(socket.AF_UNIX) as listening:
        path = Path(folder) / "server"
        listening.bind(str(path))
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve([listening])), name="kvpool-server", daemon=True
        )
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise AbortedError("the server did not start; what it wrote above says why")
                thread.join(_STEP_S)
            yield path
        finally:
            server.should_exit = True
            thread.join(_STOP_S)
