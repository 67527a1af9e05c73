"""`kvpool size`: how much fits, from a model's config.json, a device and a few flags."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvpool.cli.configs import read_description
from kvpool.cli.lengths import read_lengths
from kvpool.cli.numbers import count, gib, length, share, size, stages, told
from kvpool.cli.size_tables import print_needs, print_sizing, print_sizings
from kvpool.errors import ConfigError
from kvpool.models.description import Description
from kvpool.models.dtypes import KV_DTYPES
from kvpool.models.sizing import Host, Sizing, size_model
from kvpool.plan.budget import UTILIZATION
from kvpool.plan.deployment import CACHE_MODES, Deployment
from kvpool.plan.devices import DEVICES, Device, device
from kvpool.plan.lengths import Concurrency, Lengths, concurrency
from kvpool.plan.rules import Rule, rule

NO = 1
RANKS = (1, 2, 4, 8, 16)
"""What `--users` tries where no device is named."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of it."""
    parser.description = (
        "How many blocks, tokens and requests fit, from a model's config.json and a device or its memory. "
        "Lists (MODEL…, --device, --kv-dtype, --max-model-len) give a table."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", nargs="+", metavar="MODEL", help="a config.json, the folder that it is in, or - for standard input"
    )
    _add_memory(parser)
    _add_deployment(parser)
    _add_question(parser)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory of a rank")
    group.add_argument(
        "--device", type=_devices, metavar="NAME,…", help="such as H100, or a size: 80GB is decimal, 79.18GiB binary"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=share, default=UTILIZATION, metavar="U", help="default: %(default)s"
    )
    group.add_argument(
        "--kv-gib", type=gib, metavar="G,…", help="for the cache, instead of an estimate; of each stage with --pp"
    )
    group.add_argument("--weights", type=size, metavar="SIZE", help="of a rank, instead of a count: 20GB, 18.6GiB")
    group.add_argument("--overhead", type=size, metavar="SIZE", help="all that is neither weights nor cache: 4GB")
    group.add_argument("--enforce-eager", action="store_true", help="no graphs are captured")


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is served")
    group.add_argument("--tp", type=count, default=1, metavar="N", help="ranks that divide each layer")
    group.add_argument("--pp", type=stages, default=1, metavar="N", help="stages, or layers of each: 16,32")
    group.add_argument("--dp", type=count, default=1, metavar="N", help="replicas")
    group.add_argument("--dcp", type=count, default=1, metavar="N", help="ranks, of --tp, that divide the tokens")
    group.add_argument("--enable-expert-parallel", action="store_true", help="ranks have whole experts")
    group.add_argument("--block-size", type=count, metavar="N", help="tokens a block (default: 16, or as the rule has)")
    group.add_argument(
        "--kv-dtype",
        "--kv-cache-dtype",
        type=_names,
        default=("auto",),
        metavar="NAME,…",
        help=", ".join(KV_DTYPES),
    )
    group.add_argument("--dtype", metavar="NAME", help="of the model, instead of what the file says")
    group.add_argument(
        "--max-model-len",
        type=_lengths,
        metavar="N,…",
        help="of one request; 32k is 32,000, 32K 32,768, auto the longest that fits (default: the model's)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=count,
        metavar="N",
        help="a step (default: 8192; 2048 on A100 and below 70 GiB)",
    )
    group.add_argument(
        "--max-num-seqs", type=count, metavar="N", help="a step (default: 1024; 256 on A100 and below 70 GiB)"
    )
    group.add_argument("--mtp", action="store_true", help="the model's own draft heads run beside it")
    group.add_argument("--draft-model", metavar="MODEL", help="a draft model beside it")
    group.add_argument("--num-speculative-tokens", type=count, default=0, metavar="N", help="drafted a step")
    group.add_argument("--mamba-cache-mode", choices=CACHE_MODES, help="of vLLM's rules, for models with states")
    group.add_argument("--model-type", metavar="NAME", help="read the file as one of this model_type")


def _add_question(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the question")
    group.add_argument(
        "--rule",
        type=told(rule),
        default=rule("blocks"),
        metavar="RULE",
        help="how to count: blocks (as the cache admits), steady (bytes of content), or vllm-VERSION (default: blocks)",
    )
    group.add_argument("--users", type=count, metavar="N", help="what do so many requests of --max-model-len need?")
    group.add_argument(
        "--for",
        dest="lengths",
        metavar="LENGTHS",
        help="how many requests of these lengths: a trace, a table with a column count, or 2000:50,8000:10",
    )
    group.add_argument("--explain", action="store_true", help="every step with its numbers")
    group.add_argument("--json", action="store_true", help="one JSON object a run on standard output, nothing else")


@dataclass(frozen=True, slots=True)
class Answer:
    """One run. `has_room`: whether the answer to what was asked is yes."""

    sizing: Sizing
    for_lengths: Concurrency | None
    users: int | None

    @property
    def has_room(self) -> bool:
        plan = self.sizing.plan
        return plan.fits and (self.users is None or plan.keeps_nothing or plan.num_requests() >= self.users)

    def to_dict(self) -> dict[str, Any]:
        found = self.sizing.to_dict()
        if self.users is not None:
            plan = self.sizing.plan
            needed = plan.kv_bytes_for(self.users, plan.max_model_len)
            found["users"] = {"asked": self.users, "has_room": self.has_room, "kv_bytes_needed": list(needed)}
        if self.for_lengths is not None:
            of = self.for_lengths
            found["for"] = {name: getattr(of, name) for name in of.__dataclass_fields__}
        return found


def run(options: argparse.Namespace) -> int:
    """Answer what was asked, every combination of the lists; 1 when the answer is no."""
    if options.users is not None and not options.device and options.kv_gib is None:
        return _needs(options)
    answers = list(_answers(options))
    if options.json:
        for answer in answers:
            print(json.dumps(answer.to_dict()))
    elif len(answers) == 1:
        print_sizing(answers[0], explained=options.explain)
    else:
        print_sizings(answers)
        if options.explain:
            for answer in answers:
                print_sizing(answer, explained=True)
    return 0 if all(answer.has_room for answer in answers) else NO


def _answers(options: argparse.Namespace) -> Iterator[Answer]:
    lengths = None if options.lengths is None else read_lengths(options.lengths)
    draft = None if options.draft_model is None else _described(options, options.draft_model, "auto")
    descriptions = [_described(options, path, dtype) for path, dtype in product(options.model, options.kv_dtype)]
    for description, on, asked in product(descriptions, options.device or (None,), options.max_model_len or (None,)):
        sizing = _sizing(options, description, on, asked, options.tp, draft)
        yield Answer(sizing, _for(sizing, lengths), options.users)


def _for(sizing: Sizing, lengths: Lengths | None) -> Concurrency | None:
    if lengths is None or sizing.plan.keeps_nothing:
        return None
    return concurrency(sizing.plan, lengths)


def _sizing(
    options: argparse.Namespace,
    description: Description,
    on: Device | None,
    max_model_len: int | None,
    tp: int,
    draft: Description | None,
) -> Sizing:
    counted: Rule = options.rule
    most_tokens, most_requests = counted.limits(
        80 if on is None else on.total_gib, is_a100=on is not None and on.name.startswith("A100")
    )
    host = Host(
        on,
        options.gpu_memory_utilization,
        kv_bytes=options.kv_gib if options.kv_gib is None or len(options.kv_gib) > 1 else options.kv_gib[0],
        weights_bytes=options.weights,
        other_bytes=options.overhead,
        max_num_seqs=options.max_num_seqs or most_requests,
        eager=options.enforce_eager,
        expert_parallel=options.enable_expert_parallel,
    )
    deployment = Deployment(
        tp=tp,
        pp=options.pp,
        dp=options.dp,
        dcp=options.dcp,
        block_size=options.block_size,
        max_num_batched_tokens=options.max_num_batched_tokens or most_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
        mtp=options.mtp,
        mamba_cache_mode=options.mamba_cache_mode,
    )
    return size_model(description, host, deployment=deployment, rule=counted, max_model_len=max_model_len, draft=draft)


def _needs(options: argparse.Namespace) -> int:
    """For each known device, the fewest ranks that have room for so many users."""
    if options.lengths is not None or options.explain:
        raise ConfigError("--for and --explain are about one device: name it with --device, or give --kv-gib")
    draft = None if options.draft_model is None else _described(options, options.draft_model, "auto")
    answers: list[Answer] = []
    for path, dtype in product(options.model, options.kv_dtype):
        description = _described(options, path, dtype)
        for on, asked in product(DEVICES, options.max_model_len or (None,)):
            answers += _fewest_ranks(options, description, on, asked, draft)
    if options.json:
        for answer in answers:
            print(json.dumps(answer.to_dict()))
    else:
        print_needs(answers, options.users)
    return 0 if answers else NO


def _fewest_ranks(
    options: argparse.Namespace, description: Description, on: Device, asked: int | None, draft: Description | None
) -> Iterator[Answer]:
    for tp in RANKS if options.tp == 1 else (options.tp,):
        try:
            answer = Answer(_sizing(options, description, on, asked, tp, draft), None, options.users)
        except ConfigError:
            if tp in (1, options.tp):
                raise
            continue
        if answer.has_room:
            yield answer
            return


def _described(options: argparse.Namespace, path: str, kv_dtype: str) -> Description:
    return read_description(path, kv_dtype=kv_dtype, dtype=options.dtype, model_type=options.model_type)


@told
def _devices(text: str) -> Sequence[Device]:
    return [device(name) for name in text.split(",")]


def _names(text: str) -> Sequence[str]:
    return text.split(",")


def _lengths(text: str) -> Sequence[int]:
    """0 for the longest that fits."""
    return [0 if part in ("auto", "-1") else length(part) for part in text.split(",")]
