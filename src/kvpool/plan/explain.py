"""How a plan came about, step by step, as a person would write it on paper.

Knows nothing of: terminals.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from kvpool.plan.accounting import cache_mode
from kvpool.plan.budget import Budget
from kvpool.plan.demand import size_of
from kvpool.plan.kinds import ChunkedLocal, CrossAttention, LayerKind, SlidingWindow, StateSpace, kind_in_words
from kvpool.plan.memory import Plan, Stage
from kvpool.plan.spec import Attention, CachedSpec, Latent, heads_per_rank


def explain(plan: Plan, budgets: Sequence[Budget] = ()) -> Iterator[str]:
    """Lines of text: the memory, a block, the blocks, a request, what fits."""
    for index, budget in enumerate(budgets):
        yield from _memory(budget, f" of stage {index}" if len(budgets) > 1 else "")
    yield "What the layers keep of a token on a rank, or of a request"
    for index, stage in enumerate(plan.stages):
        yield from _contents(plan, stage, f"stage {index}: " if len(plan.stages) > 1 else "")
    yield "Groups over one pool" + (", the layers of all stages together" if len(plan.stages) > 1 else "")
    yield from (f"  {line.strip()}" for line in plan.layout.report().splitlines())
    yield "Blocks"
    yield from _blocks(plan)
    if not plan.keeps_nothing:
        yield f"A request of {plan.max_model_len:,} tokens"
        yield from _request(plan)
        yield "What fits"
        yield from _fit(plan)


def gib(num_bytes: float) -> str:
    """51.37 GiB (55.16 GB)"""
    return f"{num_bytes / 2**30:,.2f} GiB ({num_bytes / 1e9:,.2f} GB)"


def _memory(budget: Budget, where: str) -> Iterator[str]:
    yield f"Memory of a rank{where}"
    yield f"  {gib(budget.total_bytes)} x {budget.utilization:g} = {gib(budget.usable_bytes)} for the engine"
    for what, num_bytes in budget.needs:
        if num_bytes:
            yield f"  - {gib(num_bytes)} {what}"
    yield f"  = {gib(budget.left_bytes)} for the cache"


def _contents(plan: Plan, stage: Stage, where: str) -> Iterator[str]:
    for spec, count in stage.contents:
        yield f"  {where}{count} x {kind_in_words(spec.kind)}: {_content(spec, plan.deployment.tp)}"


def _content(spec: CachedSpec, tp: int) -> str:
    match spec:
        case Attention():
            heads = heads_per_rank(spec.num_kv_heads, tp)
            ranks = f" of {spec.num_kv_heads}" if tp > 1 else ""
            widths = (
                f"2 x {spec.head_dim}"
                if spec.head_dim_v in (None, spec.head_dim)
                else f"({spec.head_dim} + {spec.head_dim_v})"
            )
            scales = f" + scales of {spec.scale_bytes} B" if spec.scale_bytes else ""
            return f"{heads} KV heads{ranks} x {widths} x {spec.element_bytes:g} B{scales} = {spec.token_bytes(tp):,} B"
        case Latent():
            parts = f"latent {spec.kv_lora_rank} + rotated {spec.rope_dim}"
            index = f" + index key {spec.index.token_bytes} B" if spec.index else ""
            each = f" for {spec.compression} tokens" if spec.compression > 1 else ""
            return f"{parts} x {spec.element_bytes:g} B{index} = {spec.token_bytes(tp):,} B{each}, on every rank"
        case _:
            return f"a state of {spec.state_bytes(tp):,} B, however long the request"


def _blocks(plan: Plan) -> Iterator[str]:
    if plan.keeps_nothing:
        yield "  no layer keeps anything: no cache is needed"
        return
    for index, stage in enumerate(plan.stages):
        where = f"stage {index}: " if len(plan.stages) > 1 else ""
        if stage.num_blocks is None:
            yield f"  {where}keeps nothing"
            continue
        yield f"  {where}{gib(stage.kv_bytes)} / {stage.block_bytes:,} B a block = {stage.num_blocks:,} blocks"
    if len(plan.stages) > 1:
        yield f"  all stages take the fewest, those of stage {plan.tight_stage}: {plan.num_blocks:,}"
    yield f"  one of them is the null block: {plan.num_usable_blocks:,} for requests"


def _request(plan: Plan) -> Iterator[str]:
    counts = Counter(plan.kinds)
    for kind, count in counts.items():
        times = f"{count} x " if count > 1 else ""
        blocks = plan.blocks_of(kind, plan.max_model_len)
        each = " each" if count > 1 else ""
        yield f"  {times}{kind_in_words(kind)}: {_blocks_in_words(plan, kind)} = {blocks:,}{each}"
    needed = plan.blocks_per_request(plan.max_model_len)
    yield f"  together {needed:,} blocks of {plan.block_bytes:,} B: {gib(needed * plan.block_bytes)}"
    if plan.rule.counts == "vllm":
        return
    least = gib(plan.least_bytes(plan.max_model_len))
    yield f"  while it decodes: {plan.steady_blocks(plan.max_model_len):,}; its content alone: {least}"


def _blocks_in_words(plan: Plan, kind: LayerKind) -> str:
    size, length = size_of(kind), plan.max_model_len
    steps = plan.rule.in_flight_steps if plan.rule.counts == "vllm" else 1
    chunk = plan.deployment.max_num_batched_tokens * steps
    match kind:
        case SlidingWindow():
            return f"at most ceil(min({kind.window - 1:,} + {chunk:,} in flight, {length:,}) / {size:,}) + 1"
        case ChunkedLocal():
            return f"at most ceil(min({kind.chunk_size:,} + {chunk:,} in flight, {length:,}) / {size:,})"
        case StateSpace():
            of_vllm = plan.rule.counts == "vllm" and cache_mode(plan.layout, plan.rule, plan.deployment) == "none"
            held = "the state" if of_vllm else "the states that a step starts from and ends with"
            return f"{held}, and {kind.num_scratch_blocks} for drafts" if kind.num_scratch_blocks else held
        case CrossAttention():
            return f"ceil({plan.model.num_encoder_tokens:,} encoder tokens / {size:,})"
        case _:
            return f"ceil({length:,} / {size:,})"


def _fit(plan: Plan) -> Iterator[str]:
    needed = plan.blocks_per_request(plan.max_model_len)
    whole = f"{plan.num_requests():,} of them whole"
    yield f"  {plan.num_blocks:,} / {needed:,} = {plan.num_blocks / needed:,.2f} requests, {whole}"
    yield f"  rule {plan.rule.name}: {plan.rule.in_words}" + (f", {plan.rule.versions}" if plan.rule.versions else "")
    yield from (f"  {line}" for line in plan.log_lines())
    refusal = plan.refusal()
    if refusal is not None:
        yield f"  {refusal}"
