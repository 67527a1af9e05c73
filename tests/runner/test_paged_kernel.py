"""Kernels that read pages themselves: told what torch says they take. A stand-in computes, on a processor."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served, prompt_of
from tests.runner.tiny_models import tiny
from torch.nn.attention.varlen import varlen_attn

from kvpool.runner import model_cache
from kvpool.runner.attention import Rule
from kvpool.runner.paged_kernel import PagedKernel, Ragged, find_kernel


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """What the docstring of `varlen_attn` says, a query at a time."""
    assert cu_seq_k is None
    assert {x.dtype for x in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert enable_gqa == (query.shape[1] != key.shape[2])
    out = torch.full_like(query, torch.nan)
    group = query.shape[1] // key.shape[2]
    starts = cu_seq_q.tolist()
    assert max_q == max(stop - start for start, stop in pairwise(starts))
    assert max_k == int(seqused_k.max())
    for row, (start, stop) in enumerate(pairwise(starts)):
        used = int(seqused_k[row])
        keys, values = (pages[block_table[row].long()].flatten(0, 1)[:used] for pages in (key, value))
        for at in range(start, stop):
            last = used - (stop - at)
            assert window_size[1] == 0
            first = 0 if window_size[0] == -1 else max(0, last - window_size[0])
            k, v = (x[first : last + 1].repeat_interleave(group, 1) for x in (keys, values))
            shares = (torch.einsum("hd,khd->hk", query[at], k) * scale).softmax(-1)
            out[at] = torch.einsum("hk,khd->hd", shares, v)
    return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Every cache has one; how often it was called."""
    calls: list[int] = []

    def counted(*arguments: Any, **keywords: Any) -> torch.Tensor:
        calls.append(1)
        return plain(*arguments, **keywords)

    found = PagedKernel(counted, frozenset({torch.float32}))
    monkeypatch.setattr(model_cache, "find_kernel", lambda _: found)
    return lambda: len(calls)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text", "jamba", "falcon_h1", "qwen3_next"])
def test_all_that_it_takes_goes_to_it(name: str, kernel: Callable[[], int], rng: random.Random) -> None:
    served, shared = Served(tiny(name), budget=24, num_seqs=4), prompt_of(rng, 21)
    prompts = [shared + prompt_of(rng, count) for count in (1, 5, 14)]
    for round_ in range(2):
        stock.check(served, served.run([*prompts, prompt_of(rng, 30)], tag=f"{round_}-"))
    assert kernel() > 16


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "gemma2"])
def test_what_it_does_not_take_is_computed_as_ever(name: str, kernel: Callable[[], int], rng: random.Random) -> None:
    served = Served(tiny(name))
    stock.check(served, served.run([prompt_of(rng, 20), prompt_of(rng, 3)]))
    assert kernel() == 0


def test_what_it_takes() -> None:
    found, query, page = PagedKernel(plain), torch.zeros(1, 4, 64).half(), torch.zeros(2, 16, 2, 64).half()
    assert found.takes(query, [page, page], Rule(1.0))
    assert not found.takes(query.float(), [page.float()] * 2, Rule(1.0)), "no such kernel computes in fp32"
    assert not found.takes(query, [page.to(torch.float8_e4m3fn)] * 2, Rule(1.0)), "keys are of another dtype"
    assert not found.takes(query, [page, page[..., :32]], Rule(1.0)), "values are shorter"
    assert not found.takes(query, [page, page], Rule(1.0, softcap=5.0))
    assert not found.takes(query, [page, page], Rule(1.0, sinks=torch.zeros(4)))
    long = torch.zeros(1, 4, 512).half()
    assert not found.takes(long, [torch.zeros(2, 16, 2, 512).half()] * 2, Rule(1.0)), "heads are too long"


@pytest.mark.parametrize("window", [None, 8])
def test_torch_takes_what_it_is_told(window: int | None) -> None:
    """By torch's own description of the operator: names, dtypes and shapes."""
    query, page = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((7, 4, 64), (9, 16, 2, 64)))
    starts, lengths = (torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 2))
    tables = torch.empty(2, 5, dtype=torch.int32, device="meta")
    rows = Ragged(starts, lengths, tables, most_queries=6, most_keys=70)
    assert PagedKernel(varlen_attn).attend(query, [page, page], rows, window, Rule(0.1)).shape == query.shape


def test_a_processor_has_none() -> None:
    assert find_kernel(torch.device("cpu")) is None
