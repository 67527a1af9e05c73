"""`kvpool serve`: a model behind OpenAI's HTTP interface."""

import argparse
import os
import signal
import sys
from types import FrameType

from kvpool.cli.numbers import count, gib, length
from kvpool.cli.size_tables import print_facts
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.errors import ConfigError, MissingExtraError

try:
    from kvpool.runner.opening import Opening
    from kvpool.runner.startup import CacheSettings
    from kvpool.serving.app import ServerConfig
    from kvpool.serving.async_engine import AsyncEngine
    from kvpool.serving.engine_loop import EngineLoop
    from kvpool.serving.opening import open_model
    from kvpool.serving.served_model import ServedModel
    from kvpool.serving.server import Server
except MissingExtraError as error:
    missing: MissingExtraError | None = error
else:
    missing = None

API_KEYS = "KVPOOL_API_KEYS"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register `kvpool serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model as OpenAI's interface has it: completions, chats, their streams.",
    )
    model = parser.add_argument_group("the model")
    model.add_argument("--model", required=True, metavar="MODEL", help="a local folder in Hugging Face form, or demo")
    model.add_argument("--served-model-name", metavar="NAME", help="what clients call it")
    model.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu or cuda (cpu)")
    model.add_argument("--dtype", default="auto", metavar="TYPE", help="of the weights: float32, bfloat16, … (auto)")
    model.add_argument("--kv-gib", type=_gib, metavar="GIB", help="memory for the cache")
    model.add_argument("--kv-dtype", default="auto", metavar="TYPE", help="of keys and values: fp8, bfloat16, … (auto)")
    model.add_argument("--utilization", type=float, metavar="SHARE", help="of the memory that is free, instead")
    model.add_argument("--threads", type=count, metavar="N", help="of torch, on a CPU")
    model.add_argument("--allow-download", action="store_true", help="fetch a model from its hub by its name")
    model.add_argument("--block-size", type=count, default=16, metavar="TOKENS", help="tokens a block (16)")
    model.add_argument("--max-model-len", type=length, metavar="TOKENS", help="of prompt and outputs of a request")
    model.add_argument("--in-process", action="store_true", help="compute in this process, not in one of its own")
    steps = parser.add_argument_group("steps")
    steps.add_argument("--max-num-seqs", type=count, default=256, metavar="N", help="most running requests (256)")
    steps.add_argument("--max-num-batched-tokens", type=length, default=2048, metavar="N", help="tokens a step (2048)")
    server = parser.add_argument_group("the server")
    server.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    server.add_argument("--port", type=_port, default=8000, help="0 for a free one (8000)")
    server.add_argument("--max-waiting", type=count, default=1024, metavar="N", help="requests that may wait (1024)")
    server.add_argument("--max-body-mib", type=count, default=16, metavar="MIB", help="largest body that is read (16)")
    server.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="for a whole request (600)")
    server.add_argument("--drain", type=_seconds, default=30.0, metavar="S", help="for all that runs at the end (30)")
    server.add_argument("--require-cache-salt", action="store_true", help="refuse requests without a cache_salt")
    server.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"a key that clients may show, again for more of them; or {API_KEYS}, with commas between",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if missing is not None:
        raise missing
    # So that what follows the server is done on SIGTERM too.
    signal.signal(signal.SIGTERM, _exit)
    model, opened = open_model(opening_of(options), in_process=options.in_process)
    try:
        print_facts(opened.start.sizing)
        server = server_of(model, options)
        print(f"kvpool: {model.name} on http://{options.host}:{options.port}", file=sys.stderr)
        server.run()
    finally:
        model.close()
    return 0


def opening_of(options: argparse.Namespace) -> "Opening":
    """What the command line says of the model."""
    return Opening(
        options.model,
        options.dtype,
        options.device,
        options.threads,
        options.allow_download,
        CacheSettings(
            options.kv_dtype,
            options.block_size,
            options.max_model_len,
            options.max_num_batched_tokens,
            options.kv_gib,
            options.utilization,
        ),
        options.max_num_seqs,
    )


def server_of(model: "ServedModel", options: argparse.Namespace) -> "Server":
    """A server of a model, not started yet."""
    steps = SchedulerConfig(options.max_num_batched_tokens, options.max_num_seqs, waits_for_prefix=True)
    most = options.max_model_len or model.max_model_len
    engine = AsyncEngine(
        EngineLoop(model.cache, model.worker, steps), max_model_len=most, max_waiting=options.max_waiting
    )
    config = ServerConfig(
        options.served_model_name or model.name,
        api_keys=api_keys(options.api_key, os.environ.get(API_KEYS, "")),
        requires_cache_salt=options.require_cache_salt,
        timeout_s=options.timeout,
        drain_s=options.drain,
        max_body_bytes=options.max_body_mib << 20,
    )
    return Server(engine, model.tokenizer, config, host=options.host, port=options.port)


def api_keys(given: list[str], listed: str) -> tuple[str, ...]:
    """All keys. ConfigError for an empty one, which everybody would have."""
    keys = [*given, *(listed.split(",") if listed else ())]
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty: give a text that is hard to guess")
    return tuple(key.strip() for key in keys)


def _exit(_: int, __: FrameType | None) -> None:
    sys.exit(0)


def _gib(text: str) -> int:
    first, *others = gib(text)
    if others:
        raise argparse.ArgumentTypeError(f"{text!r}: one figure, the model runs on one device")
    return first


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds: more than 0")
    return value
