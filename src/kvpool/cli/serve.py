"""`kvpool serve`: a model behind OpenAI's HTTP interface."""

import argparse
import os
import socket
import sys
from typing import Any

from kvpool.cli.model_options import HOW, add_model_options, exit_on_sigterm, local_model
from kvpool.cli.numbers import count, port, seconds, wait
from kvpool.cli.size_tables import print_facts
from kvpool.errors import ConfigError

API_KEYS, ADMIN_KEY = "KVPOOL_API_KEYS", "KVPOOL_ADMIN_KEY"
_BACKLOG = 2048


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of it."""
    parser.description = "Serve a model as OpenAI's interface has it: completions, chats, their streams."
    parser.add_argument("--model", required=True, metavar="MODEL", help=HOW)
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call it")
    add_model_options(parser)
    server = parser.add_argument_group("the server")
    server.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    server.add_argument("--port", type=port, default=8000, help="0 for a free one (8000)")
    server.add_argument("--max-waiting", type=count, default=1024, metavar="N", help="requests that may wait (1024)")
    server.add_argument("--max-body-mib", type=count, default=16, metavar="MIB", help="largest body that is read (16)")
    server.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="for a whole request (600)")
    server.add_argument("--drain", type=wait, default=30.0, metavar="S", help="for all that runs at the end (30)")
    server.add_argument("--require-cache-salt", action="store_true", help="refuse requests without a cache_salt")
    server.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"a key that clients may show, again for more of them; or {API_KEYS}, with commas between",
    )  # fmt: skip
    server.add_argument("--admin-key", metavar="KEY", help=f"the key that may reset the cache; or {ADMIN_KEY}")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    here = local_model()
    exit_on_sigterm(0)
    limits = _limits(options)
    with _listening(options.host, options.port) as bound, here.opened_model(options) as (model, opened):
        print_facts(opened.start.sizing)
        config = here.ServerConfig(options.served_model_name or model.name, **limits)
        server = here.server_of(model, options, config, max_waiting=options.max_waiting)
        host, port = bound.getsockname()[:2]
        print(f"kvpool: {config.model_name} on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr)
        server.run([bound])
    return 0


def _listening(host: str, port: int) -> socket.socket:
    """The address is ours from now on, and whoever connects waits. ConfigError when somebody else has it."""
    bound: socket.socket | None = None
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return bound


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the server, in the words of its configuration."""
    return {
        "api_keys": api_keys(options.api_key, os.environ.get(API_KEYS, "")),
        "admin_key": options.admin_key or os.environ.get(ADMIN_KEY) or None,
        "requires_cache_salt": options.require_cache_salt,
        "timeout_s": options.timeout,
        "drain_s": options.drain,
        "max_body_bytes": options.max_body_mib << 20,
    }


def api_keys(given: list[str], listed: str) -> tuple[str, ...]:
    """All keys. ConfigError for an empty one, which everybody would have."""
    keys = [*given, *(listed.split(",") if listed else ())]
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty: give a text that is hard to guess")
    return tuple(key.strip() for key in keys)
