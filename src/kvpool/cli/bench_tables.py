"""How a load on one server, or on two, looks in a terminal.

Knows nothing of: how the figures came about.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.cli.console import Console, plain, show, table
from kvpool.client.figures import Figures
from kvpool.client.load import Load
from kvpool.replay.report import Percentiles
from kvpool.replay.settings import Source

_LATE_S = 0.1
_NAMES = "AB"


@dataclass(frozen=True, slots=True)
class Run:
    """What one server gave. `has_texts`: it took prompts as texts, whose lengths are about right."""

    url: str
    model: str
    has_texts: bool
    figures: Figures

    def to_dict(self, source: Source, load: Load) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "url": self.url,
            "model": self.model,
            "trace": source.name,
            "seed": source.seed,
            "prompts": "text" if self.has_texts else "token ids",
            "concurrency": load.concurrency,
            "speed": None if load.concurrency else load.speed,
            **self.figures.to_dict(),
        }


def print_runs(runs: Sequence[Run], source: Source, load: Load) -> None:
    """One server in a column, two side by side with a ratio, on standard output."""
    console = Console(highlight=False)
    how = f"{load.concurrency} at a time" if load.concurrency else f"at {load.speed:g} times the speed of arrival"
    console.print(f"[bold]{plain(source.name)}[/]")
    console.print(f"{runs[0].figures.num_requests:,} requests, {how}")
    headings = _NAMES[: len(runs)] if len(runs) > 1 else ("",)
    for name, run in zip(headings, runs, strict=True):
        console.print(f"{name} {plain(run.url)} {plain(run.model)}".strip())
    ratio = ("B / A",) if len(runs) > 1 else ()
    rows = table("", *headings, *ratio)
    for cells in zip(*(_rows(run.figures) for run in runs), strict=True):
        if cells[0] is None:
            rows.add_section()
            continue
        values = [cell.value for cell in cells if cell is not None]
        rows.add_row(cells[0].name, *(cell.text for cell in cells if cell is not None), *_ratio(values)[: len(ratio)])
    show(console, rows)
    for line in _notes(runs):
        console.print(line)


@dataclass(frozen=True, slots=True)
class _Cell:
    name: str
    text: str
    value: float | None


def _rows(figures: Figures) -> Iterator[_Cell | None]:
    """The same rows for every server; None between parts."""
    yield _count("answered", figures.num_answered)
    yield _count("failed", figures.num_requests - figures.num_answered)
    yield _decimal("seconds", figures.duration_s)
    yield None
    yield _count("prompt tokens", figures.num_prompt)
    yield _count("of them cached", figures.num_cached)
    rate = figures.hit_rate
    yield _Cell("hit rate", "-" if rate is None else f"{rate:.2%}", rate)
    yield _count("output tokens", figures.num_outputs)
    yield None
    rates = figures.rates()
    yield _decimal("requests a second", rates["requests_per_s"])
    yield _decimal("prompt tokens a second", rates["prompt_tokens_per_s"])
    yield _decimal("output tokens a second", rates["output_tokens_per_s"])
    yield from _times("time to first token", figures.time_to_first_token_s)
    yield from _times("time per output token", figures.time_per_output_token_s)
    yield from _times("between two tokens", figures.inter_token_s)
    yield from _times("whole request", figures.end_to_end_s)


def _times(what: str, times: Percentiles | None) -> Iterator[_Cell | None]:
    yield None
    for name in ("mean", "p50", "p90", "p99"):
        value = None if times is None else float(getattr(times, name))
        yield _Cell(f"{what}, {name}", "-" if value is None else f"{value * 1000:,.1f} ms", value)


def _count(name: str, value: int | None) -> _Cell:
    return _Cell(name, "-" if value is None else f"{value:,}", value)


def _decimal(name: str, value: float) -> _Cell:
    return _Cell(name, f"{value:,.2f}", value)


def _ratio(values: Sequence[float | None]) -> tuple[str, ...]:
    first, last = values[0], values[-1]
    return (f"{last / first:.2f}" if first and last is not None else "-",)


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        where = f"{plain(run.url)}: " if len(runs) > 1 else ""
        for error, number in run.figures.errors.items():
            yield f"[yellow]{where}{number:,} failed: {plain(error)}[/]"
        late = run.figures.late_s
        if late is not None and late.p99 > _LATE_S:
            yield f"[yellow]{where}1 % of requests were sent {late.p99:.2f} s late or more: this side is too slow[/]"
        if run.figures.num_cached is None:
            yield f"[dim]{where}the server does not say what it had in its cache[/]"
        if run.has_texts:
            yield f"[dim]{where}prompts went as texts, a word a token: lengths are about those of the traffic[/]"
