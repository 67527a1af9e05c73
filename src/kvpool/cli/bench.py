"""`kvpool bench`: traffic sent to one server, or to two after each other, and how soon and how fast they answer."""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from itertools import islice

from kvpool.cli.bench_tables import Run, print_runs
from kvpool.cli.numbers import count, seconds
from kvpool.cli.progress import progress_bar
from kvpool.cli.traffic import add_traffic_options, traffic
from kvpool.client.answer import AnswerError
from kvpool.client.figures import figures
from kvpool.client.load import Load, Target, aim, drive
from kvpool.client.server import Server
from kvpool.errors import ConfigError
from kvpool.replay.settings import Source
from kvpool.replay.trace import TraceRequest

API_KEY = "KVPOOL_API_KEY"
_MOST_SERVERS = 2
_FAILED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of it."""
    parser.description = (
        "Send a trace's requests, or generated ones, to a server with OpenAI's interface. Prompts have the lengths and "
        "share the prefixes that the traffic says; their text means nothing. With --url twice the same goes to one "
        "server and then to the other."
    )
    add_traffic_options(parser).add_argument(
        "--num-requests", dest="requests", type=count, default=100, metavar="N", help="sent at most (100)"
    )
    servers = parser.add_argument_group("the servers")
    servers.add_argument("--url", action="append", required=True, metavar="URL", help="http://127.0.0.1:8000; or two")
    servers.add_argument("--model", metavar="NAME", help="what to ask for (the first that a server lists)")
    servers.add_argument("--api-key", metavar="KEY", help=f"or {API_KEY}")
    servers.add_argument("--reset", action="store_true", help="have each forget its cached content before")
    servers.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="without a sign of life (600)")
    load = parser.add_argument_group("how it is sent")
    load.add_argument("--speed", type=float, default=1.0, metavar="X", help="times as fast as requests arrived (1)")
    load.add_argument("--concurrency", type=count, metavar="N", help="so many at a time, whenever they arrived")
    load.add_argument("--max-prompt-tokens", type=count, metavar="N", help="cut longer prompts")
    load.add_argument("--max-output-tokens", type=count, metavar="N", help="ask for no more, whatever the traffic says")
    load.add_argument("--end-early", action="store_true", help="let the model end an answer (ignore_eos is not sent)")
    load.add_argument("--separate-tenants", action="store_true", help="send each tenant's name as its cache_salt")
    parser.add_argument("--json", action="store_true", help="one JSON object a server on standard output, nothing else")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """1 when a request was not answered."""
    if len(options.url) > _MOST_SERVERS:
        raise ConfigError(f"--url is given {len(options.url)} times: once, or twice to compare two servers")
    load = Load(
        options.speed,
        options.concurrency,
        options.max_prompt_tokens,
        options.max_output_tokens,
        options.end_early,
        options.separate_tenants,
    )
    source = traffic(options)
    requests = list(islice(source, options.requests))
    if len(options.url) > 1:
        # What the last one cannot do is told before the first one has worked for nothing.
        for url in options.url:
            asyncio.run(_try(url, source, load, options))
    runs = [asyncio.run(_drive(url, source, requests, load, options)) for url in options.url]
    if options.json:
        for run in runs:
            print(json.dumps(run.to_dict(source, load)), flush=True)
    else:
        print_runs(runs, source, load)
    return _FAILED if any(run.figures.errors for run in runs) else 0


async def _drive(
    url: str, source: Source, requests: Sequence[TraceRequest], load: Load, options: argparse.Namespace
) -> Run:
    async with _server(url, options) as server:
        target = await _ready(server, source, load, options)
        with progress_bar("requests", total=len(requests)) as advance:
            outcomes = await drive(target, requests, load, advance)
    return Run(server.url, target.model, target.prompts.are_texts, figures(outcomes))


async def _try(url: str, source: Source, load: Load, options: argparse.Namespace) -> None:
    async with _server(url, options) as server:
        await _ready(server, source, load, options)


def _server(url: str, options: argparse.Namespace) -> Server:
    return Server(url, api_key=options.api_key or os.environ.get(API_KEY), timeout_s=options.timeout)


async def _ready(server: Server, source: Source, load: Load, options: argparse.Namespace) -> Target:
    """ConfigError when the server does not take such requests at all."""
    try:
        target = await aim(server, options.model, source.block_size, load)
        if options.reset:
            await server.reset()
    except AnswerError as error:
        raise ConfigError(str(error)) from None
    return target
