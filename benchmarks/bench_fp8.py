"""What does it cost that keys and values are kept in fp8?

The demo's model continues a dozen prompts greedily, with its own KV dtype and with fp8. Beside the tokens that come
out: both are given the text of its own dtype, and at every token of the outputs the likeliest one of each is compared.
"""

import torch
from medians import print_table

from kvpool import KVCacheManager
from kvpool.engine.engine import Engine
from kvpool.engine.generation import Generation
from kvpool.engine.model_runner import ModelRunner
from kvpool.engine.sampling import GREEDY, Logprobs, SamplingParams
from kvpool.engine.scheduler import Scheduler, SchedulerConfig
from kvpool.models.huggingface import read_model
from kvpool.plan.grouping import group_layers
from kvpool.runner.loading import LoadedModel, load
from kvpool.runner.torch_worker import TorchWorker

NUM_OUTPUTS = 64
NUM_BLOCKS = 400
BUDGET = 2048
PROMPTS = (
    "The three largest cities of Italy are",
    "To boil an egg, first",
    "A letter to my neighbour about the noise at night:",
    "Photosynthesis is the process by which",
    "Once upon a time, in a village by the sea, there lived a",
    "The difference between a list and a tuple in Python is",
    "Five reasons to walk to work every day:",
    "In 1969, the first people landed on",
    "Dear customer, we are sorry to hear that your parcel",
    "The recipe needs flour, butter, sugar and",
    "If it takes four people six hours to paint a house, then",
    "A good name for a small grey cat would be",
)


class Served:
    """The model on a pool of its own."""

    def __init__(self, loaded: LoadedModel, kv_dtype: str) -> None:
        model = read_model(loaded.config.to_dict(), name=loaded.name, kv_dtype=kv_dtype, dtype=loaded.dtype)
        layout = group_layers(model.caches())
        self.block_bytes = layout.block_bytes
        cache = KVCacheManager(NUM_BLOCKS, groups=layout.kinds, max_in_flight_tokens=BUDGET)
        self._scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=len(PROMPTS)))
        dtype = torch.float8_e4m3fn if kv_dtype == "fp8" else None
        self._runner = ModelRunner(self._scheduler, TorchWorker(loaded.model, layout, NUM_BLOCKS, kv_dtype=dtype))
        self._engine = Engine(self._scheduler, self._runner)

    def outputs(self, prompts: list[list[int]]) -> list[list[int]]:
        requests = [Generation(f"p{n}", prompt, GREEDY, max_tokens=NUM_OUTPUTS) for n, prompt in enumerate(prompts)]
        for request in requests:
            self._scheduler.add(request)
        while self._scheduler.has_work:
            self._engine.step()
        return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests]

    def told(self, text: list[int]) -> list[Logprobs]:
        """Of the last `NUM_OUTPUTS` tokens of a text."""
        params = SamplingParams(temperature=0, num_prompt_logprobs=1)
        self._scheduler.add(Generation("text", text, params, max_tokens=1))
        self._engine.step()
        assert self._runner.answer is not None
        return list(self._runner.answer.prompt_logprobs[0])[-NUM_OUTPUTS:]


def main() -> None:
    torch.set_num_threads(1)
    loaded = load("demo")
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer(prompt).input_ids for prompt in PROMPTS]
    whole, half = Served(loaded, "auto"), Served(loaded, "fp8")
    rows, sums = list[tuple[str, ...]](), [0, 0]
    for prompt, own, other in zip(prompts, whole.outputs(prompts), half.outputs(prompts), strict=True):
        same = next((n for n, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), NUM_OUTPUTS)
        told = list(zip(whole.told(prompt + own), half.told(prompt + own), strict=True))
        changed = sum(one.top[0][0] != two.top[0][0] for one, two in told)
        apart = max(abs(one.logprob - two.logprob) for one, two in told)
        differing = sum(one != two for one, two in zip(own, other, strict=True))
        rows.append((PROMPTS[len(rows)][:24], f"{same}", f"{differing}", f"{changed}", f"{apart:.2f}"))
        sums = [sums[0] + differing, sums[1] + changed]
    rows.append((f"all {len(prompts) * NUM_OUTPUTS:,} tokens", "", f"{sums[0]:,}", f"{sums[1]:,}", ""))
    columns = ("prompt", "equal\nat first", "differ", "likeliest differs\nin the same text", "log-probability\noff by")
    print_table(f"fp8: {half.block_bytes:,} B a block, {whole.block_bytes:,} in {loaded.dtype}", columns, rows)


if __name__ == "__main__":
    main()
