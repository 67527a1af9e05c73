"""How fast is the engine beside plain transformers, on the same model, in the same run?

SmolLM2 (the demo model), fp32, one torch thread, greedy. *First token*: of a prompt of 1,032 tokens, cold and with
1,000 of them cached, of which blocks of 16 find 992 and blocks of 8 all; transformers keeps a cache and crops it.
*Shared*: 16 requests, a prefix of 1,000 tokens, tails of 32, 32 outputs; beside a static batch, by hand: the prefix
once, its cache repeated, the tails as a batch. *Unrelated*: 16 prompts of 256 tokens, 32 outputs; beside a static
batch. With `--continuous` both beside transformers' continuous batching, which takes minutes. With `--vllm` all of them
beside vLLM's CPU build.

Seconds are those of the processor, which neighbours on the machine change less, with those of the clock behind; the
best of some runs. The outputs of all ways must agree; where they part, the two likeliest logits must be closer than
1e-3.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from random import Random
from time import perf_counter, process_time
from typing import Any

import torch
from demo import Demo, answers, open_demo
from medians import print_table
from peer_vllm_engine import BLOCK_SIZE, VllmEngine
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from kvpool.runner.loading import load

NUM_REQUESTS, NUM_OUTPUTS = 16, 32
PREFIX, TAIL, PROMPT = 1000, 32, 256
CLOSE = 1e-3
VLLM = "vLLM, CPU build"
Outputs = list[list[int]]


@dataclass(slots=True)
class Timed:
    """The best of some runs of one way, and the outputs of the last one."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    outputs: Outputs = field(default_factory=list)

    def run(self, way: Callable[[], Outputs]) -> None:
        begin, begin_cpu = perf_counter(), process_time()
        outputs = way()
        self.add(outputs, process_time() - begin_cpu, perf_counter() - begin)

    def add(self, outputs: Outputs, cpu_s: float, wall_s: float) -> None:
        self.outputs = outputs
        self.cpu.append(cpu_s)
        self.wall.append(wall_s)

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

    def require_same(self, prompts: Sequence[Sequence[int]], one: Outputs, other: Outputs, who: str) -> None:
        """AssertionError where two ways part at a place at which the likeliest token is no matter of rounding."""
        for prompt, *outputs in zip(prompts, one, other, strict=True):
            pairs = list(zip(*outputs, strict=True))
            at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
            if at is not None:
                top = self.prefill([[*prompt, *outputs[0][:at]]], DynamicCache())[0].topk(2)
                assert sorted(pairs[at]) == sorted(top.indices.tolist()), f"{who}, output {at}: {pairs[at]}"
                assert top.values[0] - top.values[1] < CLOSE, f"{who}, output {at}: {pairs[at]}, {top.values.tolist()}"


def first_token(demo: Demo, stock: Stock, vllm: VllmEngine | None, repeats: int) -> list[tuple[str, ...]]:
    """A row for each way."""
    rng = Random(1)
    engines = {"kvpool": demo.engine(), "kvpool, blocks of 8": demo.engine(block_size=8)}
    kept = "transformers, a kept cache"
    ways = {name: (Timed(), Timed()) for name in (*engines, kept, *([VLLM] if vllm else []))}
    for engine in engines.values():
        answers(engine, [demo.tokens(rng, 64)], 2)
    for _ in range(2 * repeats):
        prefix = demo.tokens(rng, PREFIX)
        prompts = [[prefix + demo.tokens(rng, TAIL)] for _ in range(2)]
        for name, engine in engines.items():
            for timed, prompt in zip(ways[name], prompts, strict=True):
                timed.run(partial(answers, engine, prompt, 1))
        cache = DynamicCache()
        ways[kept][0].run(partial(stock.batch, prompts[0], cache, 1))
        cache.crop(-TAIL)
        ways[kept][1].run(partial(stock.batch, [prompts[1][0][PREFIX:]], cache, 1))
        if vllm is not None:
            for timed, prompt in zip(ways[VLLM], prompts, strict=True):
                timed.add(*vllm.generate(prompt, 1))
        for name, pair in ways.items():
            for timed, prompt, truth in zip(pair, prompts, ways[kept], strict=True):
                stock.require_same(prompt, timed.outputs, truth.outputs, name)
    return [(name, cold.text, warm.text, f"{cold.cpu_s / warm.cpu_s:.1f}") for name, (cold, warm) in ways.items()]


def batches(
    demo: Demo, stock: Stock, vllm: VllmEngine | None, repeats: int, *, is_shared: bool, continuous: bool
) -> list[tuple[str, ...]]:
    """A row for each way to serve the 16 requests; all of them find nothing cached."""
    rng = Random(2)
    prefix = demo.tokens(rng, PREFIX) if is_shared else []
    tails = [demo.tokens(rng, TAIL if is_shared else PROMPT) for _ in range(NUM_REQUESTS)]
    prompts = [prefix + tail for tail in tails]
    engine, ways = demo.engine(), {name: Timed() for name in ("kvpool", "static batch", *([VLLM] if vllm else []))}
    answers(engine, [demo.tokens(rng, 64)], 2)
    for _ in range(repeats):
        engine.scheduler.reset_prefix_cache()
        ways["kvpool"].run(lambda: answers(engine, prompts, NUM_OUTPUTS))
        ways["static batch"].run(lambda: stock.on_repeated(prefix, tails) if is_shared else stock.batch(tails))
        if vllm is not None:
            vllm.forget()
            ways[VLLM].add(*vllm.generate(prompts, NUM_OUTPUTS))
    if continuous:
        ways["continuous batching"] = Timed()
        ways["continuous batching"].run(lambda: stock.continuous(prompts))
    for name, way in ways.items():
        stock.require_same(prompts, ways["kvpool"].outputs, way.outputs, name)
    workload = "shared" if is_shared else "unrelated"
    ours = ways["kvpool"].cpu_s
    return [(workload, who, way.text, f"{way.cpu_s / ours:.2f}") for who, way in ways.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--continuous", action="store_true", help="continuous batching too, which takes minutes")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each way (3)")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM's CPU build")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    demo, stock = open_demo(), Stock()
    with ExitStack() as open_peers:
        vllm = open_peers.enter_context(VllmEngine(options.vllm, demo.loaded.folder)) if options.vllm else None
        _measure(demo, stock, vllm, options)


def _measure(demo: Demo, stock: Stock, vllm: VllmEngine | None, options: argparse.Namespace) -> None:
    if vllm is not None:
        print(f"vLLM {vllm.release}, blocks of {BLOCK_SIZE}")
    columns: tuple[str, ...] = ("", "cold, s", "1,000 cached, s", "ratio")
    print_table("First token of 1,032", columns, first_token(demo, stock, vllm, options.repeats))
    rows: list[tuple[str, ...]] = []
    for is_shared in (True, False):
        rows += batches(demo, stock, vllm, options.repeats, is_shared=is_shared, continuous=options.continuous)
    print_table("16 requests, 32 outputs each", ("workload", "way", "whole run, s", "x kvpool"), rows)


if __name__ == "__main__":
    main()
