"""How fast is the engine beside plain transformers, on the same model, in the same run?

SmolLM2 (the demo model), fp32, one torch thread, greedy. *First token*: of a prompt of 1,032 tokens, cold and with
1,000 of them cached; transformers keeps a cache and crops it. *Shared*: 16 requests, a prefix of 1,000 tokens, tails of
32, 32 outputs; beside a static batch, by hand: the prefix once, its cache repeated, the tails as a batch. *Unrelated*:
16 prompts of 256 tokens, 32 outputs; beside a static batch. With `--continuous` both beside transformers' continuous
batching, which takes minutes.

Seconds are those of the processor, which neighbours on the machine change less, with those of the clock behind; the
best of some runs. The outputs of all ways must agree; where they part, the two likeliest logits must be closer than
1e-3.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from time import perf_counter, process_time
from typing import Any

import torch
from demo import Demo, answers, open_demo
from medians import print_table
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from kvpool.runner.loading import load

NUM_REQUESTS, NUM_OUTPUTS = 16, 32
PREFIX, TAIL, PROMPT = 1000, 32, 256
CLOSE = 1e-3
Outputs = list[list[int]]


@dataclass(slots=True)
class Timed:
    """The best of some runs of one way, and the outputs of the last one."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    outputs: Outputs = field(default_factory=list)

    def run(self, way: Callable[[], Outputs]) -> None:
        begin, begin_cpu = perf_counter(), process_time()
        self.outputs = way()
        self.cpu.append(process_time() - begin_cpu)
        self.wall.append(perf_counter() - begin)

    @property
    def cpu_s(self) -> float:
        return min(self.cpu)

    @property
    def text(self) -> str:
        return f"{self.cpu_s:.2f} ({min(self.wall):.2f})"


class Stock:
    """The same weights as transformers runs them, with its own caches."""

    def __init__(self) -> None:
        self.model: Any = load("demo").model

    def prefill(self, prompts: Sequence[Sequence[int]], cache: DynamicCache) -> torch.Tensor:
        """The last logits of each; prompts of one length."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor(prompts), cache=cache, logits_to_keep=1).logits[:, -1]
        return logits

    def batch(
        self, prompts: Sequence[Sequence[int]], cache: DynamicCache | None = None, num_outputs: int = NUM_OUTPUTS
    ) -> Outputs:
        """A static batch that goes on from what is cached."""
        cache = DynamicCache() if cache is None else cache
        tokens = [self.prefill(prompts, cache).argmax(-1)]
        while len(tokens) < num_outputs:
            tokens.append(self.prefill(tokens[-1][:, None].tolist(), cache).argmax(-1))
        return torch.stack(tokens, 1).tolist()  # type: ignore[no-any-return]

    def on_repeated(self, prefix: Sequence[int], tails: Sequence[Sequence[int]]) -> Outputs:
        cache = DynamicCache()
        self.prefill([prefix], cache)
        cache.batch_repeat_interleave(len(tails))
        return self.batch(tails, cache)

    def continuous(self, prompts: Sequence[Sequence[int]]) -> Outputs:
        """Pages of 16 tokens, faster here than its default."""
        config = GenerationConfig(
            max_new_tokens=NUM_OUTPUTS, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )
        batching = ContinuousBatchingConfig(page_size=16, num_blocks=2_000, max_batch_tokens=4_096)
        given = self.model.generate_batch(
            [list(prompt) for prompt in prompts], generation_config=config, continuous_batching_config=batching
        )
        own = {tuple(output.prompt_ids): output.generated_tokens for output in given.values()}
        return [own[tuple(prompt)] for prompt in prompts]

    def require_same(self, prompts: Sequence[Sequence[int]], one: Outputs, other: Outputs) -> None:
        """AssertionError where two ways part at a place at which the likeliest token is no matter of rounding."""
        for prompt, *outputs in zip(prompts, one, other, strict=True):
            pairs = list(zip(*outputs, strict=True))
            at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
            if at is not None:
                top = self.prefill([[*prompt, *outputs[0][:at]]], DynamicCache())[0].topk(2)
                assert sorted(pairs[at]) == sorted(top.indices.tolist()), f"output {at}: {pairs[at]}"
                assert top.values[0] - top.values[1] < CLOSE, f"output {at}: {pairs[at]}, {top.values.tolist()}"


def first_token(demo: Demo, stock: Stock, repeats: int) -> list[tuple[str, ...]]:
    rng, engine = Random(1), demo.engine()
    ways = {name: Timed() for name in ("cold", "warm", "stock, cold", "stock, warm")}
    answers(engine, [demo.tokens(rng, 64)], 2)
    for _ in range(2 * repeats):
        prefix = demo.tokens(rng, PREFIX)
        first, second = ([prefix + demo.tokens(rng, TAIL)] for _ in range(2))
        ways["cold"].run(partial(answers, engine, first, 1))
        ways["warm"].run(partial(answers, engine, second, 1))
        cache = DynamicCache()
        ways["stock, cold"].run(partial(stock.batch, first, cache, 1))
        cache.crop(-TAIL)
        ways["stock, warm"].run(partial(stock.batch, [second[0][PREFIX:]], cache, 1))
        stock.require_same(first, ways["cold"].outputs, ways["stock, cold"].outputs)
        stock.require_same(second, ways["warm"].outputs, ways["stock, warm"].outputs)
    rows: list[tuple[str, ...]] = []
    for who, cold, warm in (("kvpool", "cold", "warm"), ("a kept cache", "stock, cold", "stock, warm")):
        ratio = ways[cold].cpu_s / ways[warm].cpu_s
        rows.append((who, ways[cold].text, ways[warm].text, f"{ratio:.1f}"))
    return rows


def batches(demo: Demo, stock: Stock, repeats: int, *, is_shared: bool, continuous: bool) -> list[tuple[str, ...]]:
    """A row for each way to serve the 16 requests; all of them find nothing cached."""
    rng = Random(2)
    prefix = demo.tokens(rng, PREFIX) if is_shared else []
    tails = [demo.tokens(rng, TAIL if is_shared else PROMPT) for _ in range(NUM_REQUESTS)]
    prompts = [prefix + tail for tail in tails]
    engine, ways = demo.engine(), {name: Timed() for name in ("kvpool", "static batch")}
    answers(engine, [demo.tokens(rng, 64)], 2)
    for _ in range(repeats):
        engine.scheduler.reset_prefix_cache()
        ways["kvpool"].run(lambda: answers(engine, prompts, NUM_OUTPUTS))
        ways["static batch"].run(lambda: stock.on_repeated(prefix, tails) if is_shared else stock.batch(tails))
    if continuous:
        ways["continuous batching"] = Timed()
        ways["continuous batching"].run(lambda: stock.continuous(prompts))
    for way in ways.values():
        stock.require_same(prompts, ways["kvpool"].outputs, way.outputs)
    name = "shared" if is_shared else "unrelated"
    ours = ways["kvpool"].cpu_s
    return [(name, who, way.text, f"{way.cpu_s / ours:.2f}") for who, way in ways.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--continuous", action="store_true", help="continuous batching too, which takes minutes")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each way (3)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    demo, stock = open_demo(), Stock()
    columns: tuple[str, ...] = ("", "cold, s", "1,000 cached, s", "ratio")
    print_table("First token of 1,032", columns, first_token(demo, stock, options.repeats))
    rows: list[tuple[str, ...]] = []
    for is_shared in (True, False):
        rows += batches(demo, stock, options.repeats, is_shared=is_shared, continuous=options.continuous)
    print_table("16 requests, 32 outputs each", ("workload", "way", "whole run, s", "x kvpool"), rows)


if __name__ == "__main__":
    main()
