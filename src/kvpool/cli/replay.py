"""`kvpool replay`: a trace or a generated workload through a cache, at one size or many."""

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

from kvpool.cli.configs import read_description
from kvpool.cli.layers import HOW, read_groups
from kvpool.cli.progress import progress_bar
from kvpool.cli.replay_tables import print_report, print_sweep
from kvpool.cli.traffic import add_traffic_options, traffic
from kvpool.core.publication import DEFAULT_PUBLICATION, SETTINGS, Setting
from kvpool.engine.roofline import ACCELERATORS, MODELS, StepTime, roofline
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.errors import ConfigError, MissingExtraError
from kvpool.plan.deployment import Deployment
from kvpool.plan.kinds import FullAttention
from kvpool.plan.memory import Plan, plan_memory
from kvpool.replay.report import ReplayReport
from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.simulator import Job, replay, replay_many

GIB = MOST_GIB = 2**30


def _publication(text: str) -> Setting:
    return int(text) if text.isdigit() else text


# What --sweep can vary, and how its values are read.
SWEPT: dict[str, Callable[[str], Any]] = {
    "num_blocks": int,
    "kv_gib": float,
    "block_size": int,
    "max_num_batched_tokens": int,
    "max_num_seqs": int,
    "watermark": float,
    "publication": _publication,
    "seed": int,
    "rate": float,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of it."""
    parser.description = "Replay a trace, or a generated workload, through the cache and report what it hits."
    parser.set_defaults(run=run)
    add_traffic_options(parser).add_argument(
        "--requests", type=int, default=2000, metavar="N", help="of the workload (default: %(default)s)"
    )
    _add_size(parser)
    _add_engine(parser)
    many = parser.add_argument_group("many runs")
    many.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=V1,V2,…", type=_sweep, help=", ".join(SWEPT)
    )
    many.add_argument("--workers", type=int, metavar="N", help="processes for a sweep (default: one a core)")
    many.add_argument("--dask", metavar="ADDRESS", help="run a sweep on an existing Dask cluster")
    parser.add_argument("--json", action="store_true", help="one JSON object a run on standard output, nothing else")


def _add_size(parser: argparse.ArgumentParser) -> None:
    size = parser.add_argument_group("the cache")
    size.add_argument("--num-blocks", type=int, metavar="N", help="blocks in the pool, the null block included")
    size.add_argument("--kv-gib", type=float, metavar="G", help="its memory instead, with --bytes-per-token or --model")
    size.add_argument(
        "--config", metavar="CONFIG", help="a model's config.json: groups and blocks are those of its plan for --kv-gib"
    )
    size.add_argument("--bytes-per-token", type=int, metavar="B", help="of keys and values (default: of --model)")
    size.add_argument("--block-size", type=int, metavar="N", help="tokens a block (default: the trace's own, else 16)")
    size.add_argument(
        "--groups",
        default="full",
        metavar="GROUPS",
        help=f"of layers: {HOW} (default: %(default)s)",
    )
    size.add_argument(
        "--publication",
        type=_publication,
        default=DEFAULT_PUBLICATION,
        metavar="P",
        help=f"what windows and states make findable: {', '.join(SETTINGS)}, or an interval (default: %(default)s)",
    )
    size.add_argument(
        "--drop-last-block", action="store_true", help="a draft model must see the last block found again"
    )
    size.add_argument(
        "--mode",
        choices=("cache", "engine"),
        default="cache",
        help="look up one by one, or schedule on a virtual clock",
    )
    size.add_argument(
        "--raw", action="store_true", help="count every id of the trace as a full block, let the last token hit"
    )
    size.add_argument(
        "--separate-tenants", action="store_true", help="tenants of the trace share nothing, as with salts"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine mode")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, metavar="N", help="a step (default: %(default)s)"
    )
    engine.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="running at once (default: %(default)s)"
    )
    engine.add_argument(
        "--watermark", type=float, default=0.0, metavar="W", help="share kept free at admission (default: %(default)s)"
    )
    engine.add_argument(
        "--accelerator",
        choices=ACCELERATORS,
        default="H100-SXM",
        metavar="NAME",
        help=f"one of {', '.join(ACCELERATORS)}",
    )
    engine.add_argument(
        "--num-accelerators", type=int, default=1, metavar="N", help="that split the model (default: %(default)s)"
    )
    engine.add_argument("--model", choices=MODELS, default=None, metavar="NAME", help=f"one of {', '.join(MODELS)}")
    engine.add_argument("--base-ms", type=float, metavar="MS", help="of every step, instead of the estimate")
    engine.add_argument("--prefill-us", type=float, metavar="US", help="a prefilled token, instead of the estimate")
    engine.add_argument("--kv-ns", type=float, metavar="NS", help="a token of KV read, instead of the estimate")
    engine.add_argument("--check", action="store_true", help="also write and re-read every value (slow)")


def _sweep(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in SWEPT or not values:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=V1,V2,… with NAME one of {', '.join(SWEPT)}")
    try:
        return name, [SWEPT[name](value.replace("_", "")) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: values of {name} are {SWEPT[name].__name__}s") from None


def run(options: argparse.Namespace) -> int:
    """Make the runs that were asked for, and print them in the order asked."""
    swept = dict(options.sweep)
    if len(swept) < len(options.sweep):
        raise ConfigError("one name is swept twice: give all its values in one --sweep NAME=V1,V2,…")
    if options.trace is not None and swept.keys() & {"seed", "rate"}:
        raise ConfigError("seed and rate are of a --workload: a trace has its own requests and times")
    points = list(_points(swept))
    reports = _reports([_job(options, point) for point in points], options)
    if options.json:
        for point, report in zip(points, reports, strict=True):
            print(json.dumps(report.to_dict() | ({"sweep": point} if point else {})), flush=True)
    elif len(points) == 1:
        print_report(next(reports))
    else:
        print_sweep(list(reports), points)
    return 0


def _points(swept: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the swept values; one empty one without a sweep."""
    for values in product(*swept.values()):
        yield dict(zip(swept, values, strict=True))


def _job(options: argparse.Namespace, point: dict[str, Any]) -> Job:
    options = argparse.Namespace(**(vars(options) | point))
    if "num_blocks" in point:
        options.kv_gib = None
    source = traffic(options)
    return Job(source, _settings(options, source))


def _settings(options: argparse.Namespace, source: Source) -> ReplaySettings:
    settings = ReplaySettings(
        num_blocks=2,
        block_size=options.block_size,
        mode=options.mode,
        raw=options.raw,
        separate_tenants=options.separate_tenants,
        groups=read_groups(options.groups),
        publication=options.publication,
        drop_last_block=options.drop_last_block,
        scheduler=SchedulerConfig(options.max_num_batched_tokens, options.max_num_seqs, options.watermark),
        step_time=_step_time(options),
        check=options.check,
    )
    if options.config is not None:
        plan = _plan(options, settings.block_size_for(source))
        return replace(settings, num_blocks=plan.num_blocks, groups=plan.kinds)
    block_size = next((kind.block_size for kind in settings.groups if kind.block_size), settings.block_size_for(source))
    return replace(settings, num_blocks=_num_blocks(options, block_size))


def _plan(options: argparse.Namespace, block_size: int) -> Plan:
    """What the memory of a rank is for a model."""
    if options.kv_gib is None or options.num_blocks is not None or read_groups(options.groups) != (FullAttention(),):
        raise ConfigError("--config makes groups and blocks itself: give it --kv-gib G, no --num-blocks, no --groups")
    if not 0 < options.kv_gib < MOST_GIB:
        raise ConfigError(f"--kv-gib is {options.kv_gib}: more than 0 and below 2**30")
    how = Deployment(
        tp=options.num_accelerators, block_size=block_size, max_num_batched_tokens=options.max_num_batched_tokens
    )
    model = read_description(options.config).model
    return plan_memory(model, int(options.kv_gib * GIB), max_model_len=model.max_model_len or 1, deployment=how)


def _num_blocks(options: argparse.Namespace, block_size: int) -> int:
    if (options.num_blocks is None) == (options.kv_gib is None):
        raise ConfigError(
            "give the size of the cache in one way: --num-blocks N, or --kv-gib G with --bytes-per-token B"
        )
    if options.num_blocks is not None:
        return int(options.num_blocks)
    if len(read_groups(options.groups)) > 1:
        raise ConfigError(
            "--kv-gib and several --groups: how wide they are is in a model's file, so give --config FILE"
        )
    if options.bytes_per_token is None and options.model is None:
        raise ConfigError("--kv-gib needs to know what a token takes: --bytes-per-token B, or --model NAME")
    given = options.bytes_per_token
    bytes_per_token = MODELS[options.model].kv_bytes_per_token if given is None else given
    if bytes_per_token < 1 or not 0 < options.kv_gib < MOST_GIB:
        raise ConfigError(
            f"--kv-gib {options.kv_gib} and --bytes-per-token {bytes_per_token}: both are more than 0, "
            "the memory below 2**30 GiB"
        )
    return int(options.kv_gib * GIB) // (bytes_per_token * block_size)


def _step_time(options: argparse.Namespace) -> StepTime:
    accelerator, model = ACCELERATORS[options.accelerator], MODELS[options.model or "Llama-3.1-8B"]
    if options.num_accelerators < 1:
        raise ConfigError(f"--num-accelerators is {options.num_accelerators}: at least 1")
    estimate = roofline(accelerator, model, num_accelerators=options.num_accelerators)
    given = {
        "base_s": (options.base_ms, 1e-3),
        "prefill_token_s": (options.prefill_us, 1e-6),
        "kv_token_s": (options.kv_ns, 1e-9),
    }
    return replace(estimate, **{name: value * unit for name, (value, unit) in given.items() if value is not None})


def _reports(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[ReplayReport]:
    """Run one job here, and many side by side; a bar on standard error where a person is watching."""
    if len(jobs) == 1:
        with progress_bar("requests") as advance:
            report = replay(jobs[0].source, jobs[0].settings, advance)
        yield report
        return
    with _executor(options, len(jobs)) as executor, progress_bar("runs", total=len(jobs)) as advance:
        for number, report in enumerate(replay_many(jobs, executor), 1):
            advance(number)
            yield report


@contextmanager
def _executor(options: argparse.Namespace, num_jobs: int) -> Iterator[Executor]:
    if options.dask is not None:
        with _dask_executor(options.dask) as executor:
            yield executor
        return
    num_workers = options.workers if options.workers is not None else min(os.cpu_count() or 1, num_jobs)
    if num_workers < 1:
        raise ConfigError(f"--workers is {num_workers}: at least 1 process")
    with ProcessPoolExecutor(min(num_workers, num_jobs)) as executor:
        try:
            yield executor
        except BaseException:
            # Whoever interrupts does not want to wait for the runs that are under way or queued.
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


@contextmanager
def _dask_executor(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError("distributed", "dask") from None
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dask {address}: no Dask scheduler answers there ({error})") from None
    with client:
        yield client.get_executor()
