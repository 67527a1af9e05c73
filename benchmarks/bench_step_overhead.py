"""What does a step cost outside the model?

Measured from the end of one call of the worker to the begin of the next, on the engine's thread: commit, stop tokens,
telling, schedule, the arrays of the next step. The worker answers at once with made-up tokens; one request in 16 fills
a block in each step. *coming and going*: in each step one in 192 ends and another one is admitted (the mean, the others
are medians). With `--model` also 16 requests of the demo model, and the share of their steps that is outside of it.
"""

import argparse
from collections.abc import Sequence
from random import Random
from statistics import fmean, median
from threading import Event
from time import perf_counter, thread_time

import numpy as np
from medians import print_table

from kvpool import FullAttention, KVCacheManager, LayerKind, SlidingWindow
from kvpool.engine.generation import Generation
from kvpool.engine.sampling import GREEDY, SamplingParams
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.engine.step_input import StepAnswer, StepInput, Worker
from kvpool.serving.engine_loop import EngineLoop, Report, Stepped

STEPS = 192
VOCABULARY = 128_000
LAYOUTS: dict[str, tuple[LayerKind, ...]] = {
    "1 full": (FullAttention(),),
    "and a window": (FullAttention(), SlidingWindow(128)),
}


class Answering:
    """A worker that knows all tokens beforehand."""

    def __init__(self, num_rows: int) -> None:
        self._tokens = np.random.default_rng(1).integers(1, VOCABULARY, (16, num_rows))
        self._num_steps = 0

    def execute(self, step: StepInput) -> StepAnswer:
        self._num_steps += 1
        return StepAnswer(self._tokens[self._num_steps % 16, : step.num_rows], {}, {})


class Watched:
    """A worker whose calls are timed; of steps with so many rows that do not all begin."""

    def __init__(self, worker: Worker, num_rows: int) -> None:
        self._worker = worker
        self._num_rows = num_rows
        self._before: tuple[float, float, bool] | None = None
        self.outside_s: list[float] = []
        self.outside_cpu_s: list[float] = []
        self.inside_s: list[float] = []

    def execute(self, step: StepInput) -> StepAnswer:
        begin, begin_cpu = perf_counter(), thread_time()
        counts = step.num_rows == self._num_rows and step.num_decoding > 0
        if self._before is not None and counts and self._before[2]:
            self.outside_s.append(begin - self._before[0])
            self.outside_cpu_s.append(begin_cpu - self._before[1])
        answer = self._worker.execute(step)
        self._before = perf_counter(), thread_time(), counts
        if counts:
            self.inside_s.append(self._before[0] - begin)
        return answer


def run(cache: KVCacheManager, worker: Worker, requests: Sequence[Generation], config: SchedulerConfig) -> Watched:
    """All requests to their ends, on an engine loop."""
    watched = Watched(worker, config.max_num_seqs)
    done, left = Event(), {request.request_id for request in requests}

    def tell(report: Report) -> None:
        if isinstance(report, Stepped):
            left.difference_update(request.request_id for request in report.output.ended)
        if not left:
            done.set()

    loop = EngineLoop(cache, watched, config)
    for request in requests:
        loop.add(request)
    loop.start(tell)
    done.wait()
    loop.stop()
    return watched


def made_up(
    num_rows: int, groups: Sequence[LayerKind], sampling: SamplingParams = GREEDY, *, changes: bool = False
) -> Watched:
    """With `changes` the first requests end one after the other, and others come for them."""
    rng = Random(1)
    most = 1 << 20
    num_blocks = num_rows * (STEPS // 16 + 4) * len(groups)
    cache = KVCacheManager(num_blocks, groups=groups, events=False, max_in_flight_tokens=most)
    outputs = [max(STEPS * row // num_rows, 1) for row in range(num_rows)] if changes else []
    outputs += [STEPS] * num_rows
    requests = [
        Generation(
            f"r{number}",
            [rng.randrange(VOCABULARY) for _ in range(32 + number % 16)],
            sampling,
            stop_token_ids=(0, VOCABULARY),
            max_tokens=max_tokens,
        )
        for number, max_tokens in enumerate(outputs)
    ]
    return run(cache, Answering(num_rows), requests, SchedulerConfig(most, num_rows))


def with_model() -> Watched:
    """16 requests of 64 tokens, with 32 outputs."""
    # So that the other table needs no torch.
    from demo import open_demo

    demo, rng, num_rows = open_demo(), Random(1), 16
    requests = [Generation(f"r{row}", demo.tokens(rng, 64), max_tokens=32) for row in range(num_rows)]
    return run(demo.cache(200), demo.worker(200), requests, SchedulerConfig(2048, num_rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true", help="the demo model too (needs torch)")
    options = parser.parse_args()
    rows = []
    for name, groups in LAYOUTS.items():
        for num_rows in (1, 16, 256, 1000, 4000):
            greedy, drawn = made_up(num_rows, groups), made_up(num_rows, groups, SamplingParams())
            changing = made_up(num_rows, groups, changes=True) if num_rows > 1 else None
            figures = [median(each.outside_s) for each in (greedy, drawn)]
            figures += [median(greedy.outside_cpu_s)] + ([fmean(changing.outside_s)] if changing else [])
            rows.append((name, f"{num_rows:,}", *(f"{seconds * 1e6:,.0f}" for seconds in figures)))
    columns = ("groups", "requests", "greedy, us", "drawn", "greedy, CPU", "coming and going")
    print_table("A step outside the model", columns, rows)
    if options.model:
        watched = with_model()
        outside, inside = median(watched.outside_s), median(watched.inside_s)
        share = f"{outside / (outside + inside):.2%}"
        row = ("a step", f"{outside * 1e6:,.0f}", f"{inside * 1e3:.1f}", share)
        print_table("16 requests of the demo model", ("", "outside, us", "inside, ms", "share"), [row])


if __name__ == "__main__":
    main()
