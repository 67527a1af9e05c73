"""How much fits, as it looks in a terminal.

Knows nothing of: how the figures came about.
"""

from collections.abc import Iterator, Sequence
from math import isinf
from typing import Protocol

from kvpool.cli.console import Console, Table, plain, show, table
from kvpool.models.sizing import Sizing
from kvpool.plan.budget import Budget
from kvpool.plan.explain import explain, gib
from kvpool.plan.kinds import kind_in_words
from kvpool.plan.lengths import Concurrency
from kvpool.plan.memory import GIB, Plan


class Answer(Protocol):
    """What is printed: a sizing, and what was asked of it beside."""

    @property
    def sizing(self) -> Sizing: ...
    @property
    def for_lengths(self) -> Concurrency | None: ...
    @property
    def users(self) -> int | None: ...
    @property
    def has_room(self) -> bool: ...


def print_sizing(answer: Answer, *, explained: bool = False) -> None:
    """One run, on standard output; `explained`: every step instead of the summary."""
    console, sizing = Console(highlight=False), answer.sizing
    console.print(f"[bold]{plain(sizing.plan.model.name)}[/]")
    console.print(_what(sizing))
    if explained:
        for line in explain(sizing.plan, sizing.budgets):
            console.print(plain(line), soft_wrap=True)
    else:
        for index, budget in enumerate(sizing.budgets):
            stage = f", stage {index}" if len(sizing.budgets) > 1 else ""
            show(console, _budget(budget, f"memory of a rank{stage}", "device"))
        console.print(_facts(sizing.plan))
        for line in sizing.plan.log_lines():
            console.print(line)
    for line in (*_asked(answer), *_notes(sizing)):
        console.print(line, soft_wrap=True)


def print_facts(sizing: Sizing) -> None:
    """At the start of a server, on standard error: the budget, the layout, and the lines that operators know."""
    console = Console(stderr=True, highlight=False)
    for budget in sizing.budgets:
        show(console, _budget(budget, "memory", "free before the start"))
    console.print(_facts(sizing.plan))
    for line in sizing.plan.log_lines():
        console.print(line)


def print_sizings(answers: Sequence[Answer]) -> None:
    """Many runs, a row each."""
    console = Console(highlight=False)
    plans = [answer.sizing.plan for answer in answers]
    columns = {
        "model": [plain(plan.model.name) for plan in plans],
        "device": [_device(answer.sizing) for answer in answers],
        "KV dtype": [plan.model.kv_dtype for plan in plans],
        "max len": [f"{plan.max_model_len:,}" for plan in plans],
    }
    varied = {name: cells for name, cells in columns.items() if len(set(cells)) > 1}
    rows = table(next(iter(varied), "model"), *list(varied)[1:], "GiB", "blocks", "KV tokens", "requests", "longest")
    firsts = zip(*(varied or {"model": columns["model"]}).values(), strict=True)
    for plan, first in zip(plans, firsts, strict=True):
        rows.add_row(*first, *_row(plan))
    same = [f"{name} {cells[0]}" for name, cells in columns.items() if name not in varied and cells[0]]
    console.print(f"[bold]{', '.join(same)}[/]")
    console.print(f"rule {plans[0].rule.name}; requests of max len at a time; GiB for the cache on a rank")
    show(console, rows)
    for answer in answers:
        for line in _asked(answer):
            console.print(f"{plain(_name(answer))}: {line}", soft_wrap=True)
    for note in dict.fromkeys(line for answer in answers for line in _notes(answer.sizing, named=True)):
        console.print(note, soft_wrap=True)


def print_needs(answers: Sequence[Answer], users: int) -> None:
    """For each device the fewest ranks that have room."""
    console = Console(highlight=False)
    if not answers:
        console.print(f"[yellow]No known device has room for {users:,} such requests on up to 16 ranks.[/]")
        return
    plan = answers[0].sizing.plan
    console.print(f"[bold]{plain(plan.model.name)}[/]")
    console.print(f"room for {users:,} requests of {plan.max_model_len:,} tokens at a time, nothing shared")
    rows = table("device", "ranks (TP)", "GiB of KV a rank", "needed", "requests")
    for answer in answers:
        plan = answer.sizing.plan
        needed = max(plan.kv_bytes_for(users, plan.max_model_len))
        have = plan.stages[plan.tight_stage].kv_bytes
        ranks = str(plan.deployment.tp)
        rows.add_row(
            _device(answer.sizing), ranks, f"{have / GIB:,.2f}", f"{needed / GIB:,.2f}", f"{plan.num_requests():,}"
        )
    show(console, rows)
    for line in _notes(answers[0].sizing):
        console.print(line, soft_wrap=True)


def _what(sizing: Sizing) -> str:
    plan, weights = sizing.plan, sizing.description.weights
    parts = [f"{len(plan.model.layers)} layers"]
    if weights is not None:
        total, active = weights.parameters.total, weights.parameters.active
        parts.append(
            f"{total / 1e9:,.2f} B parameters" + (f", {active / 1e9:,.2f} B active" if active < 0.9 * total else "")
        )
    parts.append(f"KV dtype {plan.model.kv_dtype}")
    if _device(sizing):
        parts.append(_device(sizing))
    deployment = plan.deployment
    given = {"TP": deployment.tp, "PP": len(plan.stages), "DP": deployment.dp, "DCP": deployment.dcp}
    parts += [f"{name} {number}" for name, number in given.items() if number > 1]
    return ", ".join(parts)


def _device(sizing: Sizing) -> str:
    return "" if sizing.host.device is None else plain(sizing.host.device.name)


def _budget(budget: Budget, whose: str, total: str) -> Table:
    rows = table(whose, "GiB", "GB")
    rows.add_row(total, *_both(budget.total_bytes))
    rows.add_row(f"of it {budget.utilization:g} for the engine", *_both(budget.usable_bytes))
    for what, num_bytes in budget.needs:
        if num_bytes:
            rows.add_row(f"- {what}", *_both(num_bytes))
    rows.add_row("= for the cache", *_both(budget.left_bytes))
    return rows


def _both(num_bytes: int) -> tuple[str, str]:
    return f"{num_bytes / GIB:,.2f}", f"{num_bytes / 1e9:,.2f}"


def _facts(plan: Plan) -> Table:
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _lines(plan):
        facts.add_row(name, value)
    return facts


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.keeps_nothing:
        yield "cache", "none: no layer keeps anything of a request"
        return
    length = plan.max_model_len
    if len(plan.stages) > 1:
        for index, stage in enumerate(plan.stages):
            decides = ", which decides" if index == plan.tight_stage else ""
            blocks = (
                "no cache" if stage.num_blocks is None else f"{stage.num_blocks:,} blocks of {stage.block_bytes:,} B"
            )
            yield f"stage {index}", f"{stage.num_layers} layers, {gib(stage.kv_bytes)}, {blocks}{decides}"
    else:
        yield "memory for the cache", gib(plan.stages[0].kv_bytes)
    null = ", one of them the null block" if plan.num_blocks else ""
    yield "blocks", f"{plan.num_blocks:,} of {plan.block_bytes:,} B{null}"
    for group in dict.fromkeys(group.kind for group in plan.layout.groups):
        of_kind = [each for each in plan.layout.groups if each.kind == group]
        layers = sum(len(each.pages) for each in of_kind)
        yield (
            f"{len(of_kind)} group{'s' if len(of_kind) > 1 else ''}",
            f"{kind_in_words(group)}: {layers} layers, {group.block_size:,} tokens a block",
        )
    slope = plan.bytes_per_token
    yield "a token more takes", f"{float(slope):,.0f} B" if slope else "nothing: all layers are bounded"
    constant = plan.constant_bytes(length)
    if constant:
        yield "beside that a request takes", f"{gib(constant)} of windows, states or an encoder"
    steady = "" if plan.rule.counts == "vllm" else f" at most, {plan.steady_blocks(length):,} while it decodes"
    yield f"a request of {length:,}", f"{plan.blocks_per_request(length):,} blocks{steady}"
    yield "longest request that fits", _longest(plan)
    hit = plan.smallest_hit
    yield "smallest prefix that can hit", "none ever" if hit is None else f"{hit:,} tokens"
    waste = plan.layout.waste
    if waste.share:
        yield "waste", f"{waste}; {100 * float(waste.share):.2f} % of the bytes hold nothing"
    versions = f", {plan.rule.versions}" if plan.rule.versions else ""
    yield "rule", f"{plan.rule.name}: {plan.rule.in_words}{versions}"
    if plan.deployment.dp > 1:
        yield "replicas", f"{plan.deployment.dp}, each with all of this: {plan.deployment.dp * plan.kv_tokens:,} tokens"


def _longest(plan: Plan) -> str:
    if plan.longest is None:
        return "any"
    made_for = plan.model.max_model_len
    beyond = "" if made_for is None or plan.longest <= made_for else f"; the model was made for {made_for:,}"
    return f"{plan.longest:,} tokens{beyond}"


def _row(plan: Plan) -> Iterator[str]:
    concurrency = plan.max_concurrency()
    yield f"{plan.stages[plan.tight_stage].kv_bytes / GIB:,.2f}"
    yield f"{plan.num_blocks:,}"
    yield f"{plan.kv_tokens:,}"
    yield "any" if isinf(concurrency) else f"{concurrency:,.2f}"
    yield "any" if plan.longest is None else f"{plan.longest:,}"


def _asked(answer: Answer) -> Iterator[str]:
    """What was asked beside."""
    of = answer.for_lengths
    if of is not None:
        yield (
            f"Requests of these lengths (mean {of.mean_tokens:,.0f} tokens): {of.mean_requests:,.1f} at a time on "
            f"average, {of.safe_requests:,} that fit 99 % of the time, {of.at_full_length:,.1f} at full length."
        )
        if of.num_too_long:
            yield f"[yellow]{of.num_too_long:,} requests are longer than what fits, and not counted.[/]"
    if not answer.has_room:
        yield f"[yellow]Does not fit: {_why_not(answer)}[/]"
    elif answer.users is not None:
        yield f"There is room for {answer.users:,} such requests."


def _why_not(answer: Answer) -> str:
    plan = answer.sizing.plan
    short = [-budget.left_bytes for budget in answer.sizing.budgets if budget.left_bytes < 0]
    if short:
        return f"the rest alone needs {gib(max(short))} more than there is"
    refusal = plan.refusal()
    if refusal is not None:
        return refusal
    assert answer.users is not None
    needed = max(plan.kv_bytes_for(answer.users, plan.max_model_len))
    return (
        f"{answer.users:,} requests of {plan.max_model_len:,} tokens need {gib(needed)} of cache on a rank; "
        f"there is room for {plan.num_requests():,}"
    )


def _notes(sizing: Sizing, *, named: bool = False) -> Iterator[str]:
    of = f" of {sizing.plan.model.name}" if named else ""
    for note in sizing.notes:
        yield f"[dim]assumed{plain(of)}: {plain(note)}[/]"


def _name(answer: Answer) -> str:
    plan = answer.sizing.plan
    return ", ".join(filter(None, (plan.model.name, _device(answer.sizing), f"{plan.max_model_len:,} tokens")))
