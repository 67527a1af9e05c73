"""How a replay looks in a terminal.

Knows nothing of: how the figures came about.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from kvpool.cli.console import Console, Table, plain, show, table
from kvpool.plan.kinds import FullAttention, kind_in_words
from kvpool.replay.report import Percentiles, ReplayReport, Tally, Timing

_MAX_ROWS = 12


def print_report(report: ReplayReport) -> None:
    """One run, on standard output."""
    console = Console(highlight=False)
    console.print(f"[bold]{plain(report.trace)}[/]")
    console.print(_size(report))
    for line in _groups([report]):
        console.print(line)
    show(console, _hits(report.all))
    show(console, _facts(report))
    if report.timing is not None:
        show(console, _times(report.timing))
    for title, tallies in (("tenant", report.by_tenant), ("turn", dict(sorted(report.by_turn.items())))):
        if tallies:
            show(console, _breakdown(title, tallies.items()))
            if len(tallies) > _MAX_ROWS:
                console.print(f"[dim]… and {len(tallies) - _MAX_ROWS} more (--json has all)[/]")
    for line in _notes(report):
        console.print(f"[dim]{line}[/]")


def print_sweep(reports: Sequence[ReplayReport], points: Sequence[dict[str, Any]]) -> None:
    """Many runs, a row each; `points` are the swept values of each run."""
    console = Console(highlight=False)
    first = reports[0]
    totals = {report.all.total_tokens for report in reports}
    total = f", {totals.pop():,} prompt tokens" if len(totals) == 1 else ""
    console.print(f"[bold]{plain(first.trace)}[/]")
    console.print(f"{_mode(first)}, {first.policy}, {len(reports)} runs{total}")
    for line in _groups(reports):
        console.print(line)
    given = [name for name in points[0] if name != "num_blocks"]
    headings = [name.replace("_", "\n") for name in given]
    tokens = ("hit tokens",) if total else ("hit tokens", "of")
    times = ("pre-\nempted", "TTFT\np50, s", "TTFT\np99, s") if first.timing is not None else ()
    refused = ("refused",) if any(report.num_refused for report in reports) else ()
    rates = ("hit\nrate", "infinite\ncache", "block\nrate")
    rows = table("blocks", *headings, *tokens, *rates, "evicted", *times, *refused)
    for report, point in zip(reports, points, strict=True):
        counted = (f"{report.all.hit_tokens:,}", f"{report.all.total_tokens:,}")[: len(tokens)]
        last = (f"{report.num_refused:,}",)[: len(refused)]
        own = (str(point[name]) for name in given)
        rows.add_row(f"{report.num_blocks:,}", *own, *counted, *_sweep_cells(report), *last)
    show(console, rows)
    if first.num_skipped_lines:
        console.print(f"[yellow]{first.num_skipped_lines:,} bad lines skipped[/]")
    for line in _notes(first):
        console.print(f"[dim]{line}[/]")


def _sweep_cells(report: ReplayReport) -> Iterator[str]:
    tally = report.all
    yield from (_percent(tally.token_hit_rate), _percent(tally.ideal_token_hit_rate), _percent(tally.block_hit_rate))
    yield f"{report.evictions:,}"
    if report.timing is not None:
        first_token = report.timing.time_to_first_token_s
        yield from (f"{report.preemptions:,}", _seconds(first_token.p50), _seconds(first_token.p99))


def _size(report: ReplayReport) -> str:
    return f"{_mode(report)}, {report.num_blocks:,} blocks of {report.block_size} tokens, {report.policy}"


def _groups(reports: Sequence[ReplayReport]) -> Iterator[str]:
    """What kinds of layers there are, and what that means for hits; nothing where all is as one would think."""
    first, publications = reports[0], {report.publication for report in reports}
    counts = Counter(first.groups)
    if len(first.groups) > 1 or first.groups[0] != kind_in_words(FullAttention()):
        kinds = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in counts.items())
        publication = str(first.publication) if len(publications) == 1 else "as in each row"
        yield f"{_counted(len(first.groups), 'group')}: {kinds}; publication {publication}"
    if first.smallest_hit is None:
        yield "[yellow]no prefix can ever hit: a group of states keeps no checkpoints[/]"
    elif len({report.smallest_hit for report in reports}) > 1:
        return
    elif first.smallest_hit > first.block_size or len(first.groups) > 1:
        yield (
            f"hits end at multiples of {first.alignment:,} tokens; "
            f"smallest prefix that can hit: {first.smallest_hit:,} tokens"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mode(report: ReplayReport) -> str:
    return f"{report.mode} mode, raw counting" if report.raw else f"{report.mode} mode"


def _hits(tally: Tally) -> Table:
    rows = table("hits", "hit", "of", "rate", "infinite cache", "rate")
    rows.add_row(
        "prompt tokens",
        f"{tally.hit_tokens:,}",
        f"{tally.total_tokens:,}",
        _percent(tally.token_hit_rate),
        f"{tally.ideal_hit_tokens:,}",
        _percent(tally.ideal_token_hit_rate),
    )
    rows.add_row(
        "full blocks",
        f"{tally.hit_blocks:,}",
        f"{tally.total_blocks:,}",
        _percent(tally.block_hit_rate),
        f"{tally.ideal_hit_blocks:,}",
        _percent(tally.ideal_block_hit_rate),
    )
    rows.add_row("mean of requests", "", f"{tally.num_requests:,}", _percent(tally.mean_request_hit_rate), "", "")
    return rows


def _facts(report: ReplayReport) -> Table:
    tally = report.all
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    keeps_all = all(kind.startswith(kind_in_words(FullAttention())) for kind in report.groups)
    cause = " after eviction" if keeps_all else ", evicted or not kept"
    table.add_row(f"tokens computed again{cause}", f"{tally.recomputed_tokens:,}")
    table.add_row("evicted blocks", f"{report.evictions:,}")
    table.add_row("blocks held: peak, mean", f"{_percent(report.peak_held)}, {_percent(report.mean_held)}")
    if report.timing is not None:
        table.add_row("preemptions", f"{report.preemptions:,}")
        table.add_row("tokens computed again after preemption", f"{report.preempted_tokens:,}")
        table.add_row("output tokens", f"{report.timing.num_output_tokens:,}")
        table.add_row("steps, seconds", f"{report.timing.num_steps:,}, {report.timing.duration_s:,.1f}")
    if report.num_refused:
        table.add_row("[yellow]requests that can never fit[/]", f"[yellow]{report.num_refused:,}[/]")
    if report.num_skipped_lines:
        table.add_row("[yellow]bad lines skipped[/]", f"[yellow]{report.num_skipped_lines:,}[/]")
    return table


def _times(timing: Timing) -> Table:
    rows = table("seconds", "mean", "p50", "p90", "p99", "max")
    _add_times(rows, "queueing", timing.queueing_s)
    _add_times(rows, "time to first token", timing.time_to_first_token_s)
    _add_times(rows, "end to end", timing.end_to_end_s)
    return rows


def _add_times(table: Table, what: str, times: Percentiles) -> None:
    table.add_row(what, *(_seconds(value) for value in (times.mean, times.p50, times.p90, times.p99, times.max)))


def _breakdown(title: str, tallies: Iterable[tuple[object, Tally]]) -> Table:
    rows = table(title, "requests", "hit tokens", "of", "rate", "infinite cache")
    for name, tally in islice(tallies, _MAX_ROWS):
        rows.add_row(
            plain(str(name)),
            f"{tally.num_requests:,}",
            f"{tally.hit_tokens:,}",
            f"{tally.total_tokens:,}",
            _percent(tally.token_hit_rate),
            _percent(tally.ideal_token_hit_rate),
        )
    return rows


def _notes(report: ReplayReport) -> Iterator[str]:
    if report.raw:
        yield "Counted raw over the whole run: listed blocks are full, a whole prompt can hit."
    else:
        yield (
            "Counted over the whole run as an engine would: only full blocks are cached, "
            "the last prompt token is always computed."
        )
    if not report.all.ideal_hit_tokens and report.smallest_hit == report.all.block_size:
        yield "No prompt repeats a full block of another: no cache of any size can help this traffic."


def _percent(share: float) -> str:
    return f"{share:.2%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f}" if seconds < 100 else f"{seconds:,.0f}"
