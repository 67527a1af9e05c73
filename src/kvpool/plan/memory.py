"""How much fits: memory of the ranks, through the bytes of a block, through the blocks of a request.

A `Plan` is a model's layout over the memory that is there for its cache, on the ranks of one replica. What it promises
of requests is counted by the formula that the cache admits by (`demand`), or by another `Rule`.

Knows nothing of: how the memory was found, configuration files, devices.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import inf, lcm

from kvpool.errors import ConfigError
from kvpool.plan import demand
from kvpool.plan.accounting import Counting, vllm_blocks, vllm_needed_bytes, vllm_tokens
from kvpool.plan.deployment import Deployment, by_stage
from kvpool.plan.kinds import FullAttention, LayerKind, cdiv
from kvpool.plan.layout import Layout
from kvpool.plan.model import Model
from kvpool.plan.rules import BLOCKS, Rule
from kvpool.plan.spec import CachedSpec, Latent, require_whole

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage; all its ranks are alike."""

    num_layers: int
    kv_bytes: int
    """For the cache, on each rank."""
    block_bytes: int
    """Of one block, on each rank; 0 where no layer of the stage keeps anything."""
    contents: tuple[tuple[CachedSpec, int], ...]
    """What its layers keep, and how many layers keep it."""

    @property
    def num_blocks(self) -> int | None:
        """How many fit; None where they take nothing."""
        return self.kv_bytes // self.block_bytes if self.block_bytes else None


@dataclass(frozen=True)
class Plan:
    """What fits: `num_blocks` blocks, block 0 being the null block, and what requests take of them.

    `KVCacheManager.from_plan(plan)` is the cache of it. Lengths are in tokens of one request, prompt and outputs.
    """

    model: Model
    layout: Layout
    stages: tuple[Stage, ...]
    deployment: Deployment
    rule: Rule
    max_model_len: int

    @cached_property
    def num_blocks(self) -> int:
        """Of the pool, on every rank: what the stage with least memory for its layers can have. 0: nothing is kept."""
        return min((blocks for stage in self.stages if (blocks := stage.num_blocks) is not None), default=0)

    @property
    def keeps_nothing(self) -> bool:
        """Whether the model needs no cache at all."""
        return not self.layout.groups

    @cached_property
    def tight_stage(self) -> int:
        """The stage that decides how many blocks there are."""
        blocks = [inf if stage.num_blocks is None else stage.num_blocks for stage in self.stages]
        return blocks.index(min(blocks))

    @property
    def block_bytes(self) -> int:
        """Of one block, on a rank of the stage that decides."""
        return self.stages[self.tight_stage].block_bytes

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every group, with its block size in tokens of the request, whatever ranks share them."""
        return self.layout.kinds

    # -- what a request takes

    def blocks_per_request(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens holds at any time, by the rule. ConfigError below 1."""
        require_whole("a request's length", num_tokens, 1)
        if self.rule.counts == "vllm":
            return vllm_blocks(self.layout, self.rule, self.deployment, num_tokens, self.model.num_encoder_tokens)
        return self.admitted_blocks(num_tokens)

    def blocks_of(self, kind: LayerKind, num_tokens: int) -> int:
        """The part of it that one group of this kind has."""
        if self.rule.counts == "vllm":
            return self._counting(num_tokens).blocks(kind)
        return demand.max_blocks(
            [kind], num_tokens, self.deployment.max_num_batched_tokens, self.model.num_encoder_tokens
        )

    def admitted_blocks(self, num_tokens: int) -> int:
        """The same by kvpool's own formula, which a cache made from this plan admits by (invariant 12)."""
        chunk = self.deployment.max_num_batched_tokens
        return demand.max_blocks(self.kinds, num_tokens, chunk, self.model.num_encoder_tokens)

    def steady_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds while it decodes at that length."""
        return demand.steady_blocks(self.kinds, num_tokens, self.model.num_encoder_tokens)

    def least_bytes(self, num_tokens: int, stage: int | None = None) -> int:
        """What the content of a request comes to on one rank, in no blocks: a lower bound."""
        encoder, total = self.model.num_encoder_tokens, 0
        for spec, count in self.stages[self.tight_stage if stage is None else stage].contents:
            kept = spec.content_bytes(demand.live_tokens(spec.kind, num_tokens, encoder), self.deployment.tp)
            total += count * cdiv(kept, self.deployment.dcp)
        return total

    @cached_property
    def bytes_per_token(self) -> Fraction:
        """The slope: what a rank of the tight stage needs for one token more of a long request.

        Windows and states do not grow, so they are not in it. Exact; whole in all but odd cases.
        """
        if self.rule.counts == "steady":
            contents = self.stages[self.tight_stage].contents
            growing = [(spec, count) for spec, count in contents if isinstance(spec.kind, FullAttention)]
            many = lcm(*(spec.compression for spec, _ in growing if isinstance(spec, Latent)))
            kept = sum(count * spec.content_bytes(many, self.deployment.tp) for spec, count in growing)
            return Fraction(kept, many * self.deployment.dcp)
        sizes = (demand.size_of(kind) for kind in self.kinds if isinstance(kind, FullAttention))
        return sum((Fraction(self.block_bytes, size) for size in sizes), Fraction(0))

    def constant_bytes(self, num_tokens: int) -> int:
        """What a request of that length needs beside the slope, on a rank of the tight stage: windows, states."""
        grown = sum(cdiv(num_tokens, demand.size_of(kind)) for kind in self.kinds if isinstance(kind, FullAttention))
        return (self.blocks_per_request(num_tokens) - grown) * self.block_bytes

    # -- what fits

    def max_concurrency(self, num_tokens: int | None = None) -> float:
        """How many requests of that length (`max_model_len`) the pool is worth: the figure of the log line.

        By the rule, the null block counted in. Infinite where a request needs nothing.
        """
        length = self.max_model_len if num_tokens is None else num_tokens
        if self.keeps_nothing:
            return inf
        if self.rule.counts == "steady":
            return min(
                stage.kv_bytes / needed
                for index, stage in enumerate(self.stages)
                if (needed := self.least_bytes(length, index))
            )
        return self.num_blocks / self.blocks_per_request(length)

    def num_requests(self, num_tokens: int | None = None) -> int:
        """How many whole requests of that length are certain to run at a time: a cache of this plan admits them."""
        length = self.max_model_len if num_tokens is None else num_tokens
        return 0 if self.keeps_nothing else self.num_usable_blocks // self.admitted_blocks(length)

    @property
    def num_usable_blocks(self) -> int:
        """All but the null block."""
        return max(self.num_blocks - 1, 0)

    @property
    def kv_tokens(self) -> int:
        """How many tokens fit, as the rule counts them: where not all layers keep everything, at `max_model_len`."""
        if self.keeps_nothing:
            return 0
        if self.rule.counts == "vllm":
            return vllm_tokens(
                self.layout, self.rule, self.deployment, self.num_blocks, self.max_model_len, self.max_concurrency()
            )
        if self.rule.counts == "blocks" and len(self.kinds) == 1 and isinstance(self.kinds[0], FullAttention):
            return self.num_blocks * demand.size_of(self.kinds[0])
        return int(Fraction(self.max_concurrency()) * self.max_model_len)

    @property
    def fits(self) -> bool:
        """Whether one request of `max_model_len` can run."""
        return self._has_room(self.max_model_len)

    @cached_property
    def longest(self) -> int | None:
        """The longest request that can run; None where any can, 0 where none can."""
        found = demand.longest(self._has_room)
        return None if found == demand.MAX_TOKENS else found

    def _has_room(self, num_tokens: int) -> bool:
        """On every stage."""
        return all(self.needed_bytes(num_tokens, index) <= stage.kv_bytes for index, stage in enumerate(self.stages))

    def needed_bytes(self, num_tokens: int, stage: int = 0) -> int:
        """What one request needs to run alone, on a rank of a stage: its blocks and the null block, or by the rule."""
        if self.keeps_nothing:
            return 0
        block_bytes = self.stages[stage].block_bytes
        if self.rule.counts == "vllm":
            return vllm_needed_bytes(self.layout, self.rule, self._counting(num_tokens), block_bytes)
        return (self.admitted_blocks(num_tokens) + 1) * block_bytes

    def _counting(self, num_tokens: int) -> Counting:
        return Counting(self.layout, self.rule, self.deployment, num_tokens, self.model.num_encoder_tokens)

    def kv_bytes_for(self, num_requests: int, num_tokens: int) -> tuple[int, ...]:
        """The inverse: memory for the cache, on a rank of each stage, for so many requests of that length at a time."""
        blocks = num_requests * self.admitted_blocks(num_tokens) + 1
        return tuple(blocks * stage.block_bytes for stage in self.stages)

    # -- what it means

    @property
    def smallest_hit(self) -> int | None:
        """The fewest tokens that a prompt must share before it can hit; None where none ever can."""
        if self.keeps_nothing or any(getattr(kind, "checkpoints", None) == "none" for kind in self.kinds):
            return None
        return demand.alignment(self.kinds) or None

    def log_lines(self) -> tuple[str, str]:
        """The two lines that operators know from a server's start."""
        return (
            f"GPU KV cache size: {self.kv_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency():.2f}x",
        )

    def refusal(self) -> str | None:
        """Why one request of `max_model_len` cannot run: stage, need, have, and the way out. None where it can."""
        if self.fits:
            return None
        needed = [self.needed_bytes(self.max_model_len, index) for index in range(len(self.stages))]
        lacking = [
            f"{self._stage_in_words(index)}needs {_apart(needed[index], stage.kv_bytes)}"
            for index, stage in enumerate(self.stages)
            if needed[index] > stage.kv_bytes
        ]
        way_out = f"{self.longest:,} tokens are the longest that fit (--max-model-len {self.longest})"
        what = f"a request of {self.max_model_len:,} tokens{':' if len(self.stages) > 1 else ''}"
        return f"{what} {', '.join(lacking)}; {way_out if self.longest else 'not even one token fits'}"

    def _stage_in_words(self, index: int) -> str:
        return f"stage {index} ({self.stages[index].num_layers} layers) " if len(self.stages) > 1 else ""


def _apart(needed: int, available: int) -> str:
    """In GiB, or in bytes where that looks the same."""
    if f"{needed / GIB:.2f}" == f"{available / GIB:.2f}":
        return f"{needed:,} B with the null block and has {available:,}"
    return f"{needed / GIB:,.2f} GiB and has {available / GIB:,.2f}"


def plan_memory(
    model: Model,
    kv_bytes: int | Sequence[int],
    *,
    max_model_len: int | None = None,
    deployment: Deployment | None = None,
    rule: Rule = BLOCKS,
    draft: Model | None = None,
) -> Plan:
    """What fits into `kv_bytes` bytes for the cache on each rank, or on a rank of each pipeline stage.

    `max_model_len` None: what the model was made for. A `draft` model's layers share the pool. ConfigError when the
    layers do not match the deployment, and when a number is out of range.
    """
    deployment = deployment or Deployment()
    length = max_model_len if max_model_len is not None else model.max_model_len
    if length is None:
        raise ConfigError(f"the configuration of {model.name} says no longest request: give max_model_len")
    if require_whole("max_model_len", length, 1) > demand.MAX_TOKENS:
        raise ConfigError(f"max_model_len is {length:,}: {demand.MAX_TOKENS:,} is the most, as positions are int32")
    caches = deployment.caches(model, draft, rule)
    layout = deployment.layout(caches, rule)
    owners = deployment.owners(model, caches)
    memory = by_stage(kv_bytes, len(deployment.stages_of(model)))
    stages = []
    for num_layers, names, available in zip(deployment.stages_of(model), owners, memory, strict=True):
        specs = Counter(spec for spec in map(caches.__getitem__, names) if isinstance(spec, CachedSpec))
        block_bytes = layout.stage_block_bytes(names) if rule.projects_stages else layout.block_bytes
        stages.append(Stage(num_layers, available, block_bytes, tuple(specs.items())))
    if len(stages) == 1:
        stages = [replace(stages[0], block_bytes=layout.block_bytes)]
    return Plan(model, layout, tuple(stages), deployment, rule, length)
