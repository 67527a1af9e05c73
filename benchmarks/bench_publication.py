"""What should windows and states make findable? Hit rates of every publication setting, at equal memory.

Generated traffic in cache mode, through three layouts and four sizes of each. A row is a kind of traffic and a layout:
the mean over the sizes. The last rows are the means over all, and the worst that a setting did against the best one in
any single run.
"""

from itertools import product

from medians import print_table

from kvpool import FullAttention, LayerKind, SlidingWindow, StateSpace
from kvpool.core.publication import Setting
from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import replay
from kvpool.replay.workload import Workload

SETTINGS: tuple[Setting, ...] = ("ranked", "every", "dense", 1024, 0)
TRAFFIC = {"mixed": 600, "chat": 400, "agents": 150, "system": 400}
LAYOUTS: dict[str, tuple[tuple[LayerKind, ...], tuple[int, ...]]] = {
    "1 full, 5 windows of 1,024": ((FullAttention(), *[SlidingWindow(1024)] * 5), (3_000, 6_000, 12_000, 24_000)),
    "1 full, 1 window of 128": ((FullAttention(), SlidingWindow(128)), (1_000, 2_000, 4_000, 8_000)),
    "1 full, 3 states": ((FullAttention(), *[StateSpace()] * 3), (600, 1_200, 2_400, 4_800)),
}


def hit_rate(traffic: str, groups: tuple[LayerKind, ...], num_blocks: int, publication: Setting) -> float:
    settings = ReplaySettings(num_blocks, groups=groups, publication=publication)
    return replay(Workload(traffic, 0, TRAFFIC[traffic]), settings).all.token_hit_rate


def main() -> None:
    rates: dict[tuple[str, str], list[list[float]]] = {}
    for traffic, (layout, (groups, sizes)) in product(TRAFFIC, LAYOUTS.items()):
        runs = [[hit_rate(traffic, groups, size, setting) for setting in SETTINGS] for size in sizes]
        rates[traffic, layout] = runs
    rows = [(f"{traffic}: {layout}", *map(_mean, zip(*runs, strict=True))) for (traffic, layout), runs in rates.items()]
    every = [run for runs in rates.values() for run in runs]
    behind = [[max(run) - rate for rate in run] for run in every]
    rows.append(("all", *map(_mean, zip(*every, strict=True))))
    rows.append(("at most behind the best", *(f"{max(column):.1%}" for column in zip(*behind, strict=True))))
    print_table("Hit tokens, by publication setting", ("traffic: layout", *map(str, SETTINGS)), rows)


def _mean(column: tuple[float, ...]) -> str:
    return f"{sum(column) / len(column):.1%}"


if __name__ == "__main__":
    main()
