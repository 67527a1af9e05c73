"""What a model of transformers says by itself, in one forward without a cache: the truth to compare with."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from tests.runner.served import Served, outputs
from tests.runner.tiny_models import Tiny

from kvpool.engine.generation import Generation

largest: dict[str, tuple[float, float]] = {}
"""Of each model: the largest difference of logits that was checked, and the tolerance there."""


@cache
def logits(tiny: Tiny, tokens: tuple[int, ...]) -> torch.Tensor:
    """(tokens, vocabulary): at each place, those of the next token."""
    with torch.inference_mode():
        found: torch.Tensor = tiny.stock(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


@cache
def _greedy(tiny: Tiny, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    said: Any = tiny.stock.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    tokens: list[int] = said[0, len(prompt) :].tolist()
    return tokens


def greedy(tiny: Tiny, prompt: Sequence[int], count: int) -> list[int]:
    """What plain `generate` gives."""
    return _greedy(tiny, tuple(prompt), max(count, 8))[:count]


def tolerance(truth: torch.Tensor) -> float:
    """Other kernels for other shapes add in another order: fp32 noise is four times below this, faults far above."""
    return 1e-5 * max(1.0, float(truth.abs().max()))


def difference(served: Served, request: Generation) -> tuple[float, float]:
    """The largest between all logits of a request and the truth, given its tokens; and the tolerance. NaN shows."""
    found = served.logits_of(request)
    assert found, f"request {request.request_id!r} has no logits"
    truth = logits(served.tiny, tuple(request.token_ids))
    places = sorted(found)
    delta = (torch.stack([found[place] for place in places]) - truth[places]).abs().max()
    return float(delta), tolerance(truth)


def is_right(served: Served, request: Generation) -> bool:
    delta, allowed = difference(served, request)
    return delta <= allowed


def check_logits(served: Served, requests: Iterable[Generation]) -> None:
    for request in requests:
        delta, allowed = difference(served, request)
        name = served.tiny.name
        largest[name] = max(largest.get(name, (0.0, allowed)), (delta, allowed))
        assert delta <= allowed, f"{_who(served, request)}: logits are off by {delta:.2e}"


def check(served: Served, requests: Iterable[Generation]) -> None:
    """Logits are those of one cold forward, tokens those of `generate`.

    Where the two likeliest tokens are closer together than what may differ, either will do, and what follows says
    nothing more: from there on it is another text.
    """
    requests = list(requests)
    check_logits(served, requests)
    for request in requests:
        found, first = outputs(request), request.num_prompt_tokens
        truth = logits(served.tiny, tuple(request.token_ids))[first - 1 : -1]
        chosen = truth.gather(-1, torch.tensor(found)[:, None])[:, 0]
        assert (chosen >= truth.max(-1).values - 2 * tolerance(truth)).all(), _who(served, request)
        pairs = truth.topk(2).values
        is_close = (pairs[:, 0] - pairs[:, 1] < 2 * tolerance(truth)).tolist()
        sure = is_close.index(True) if True in is_close else len(found)
        said = greedy(served.tiny, request.token_ids[:first], len(found))
        assert found[:sure] == said[:sure], _who(served, request)


def _who(served: Served, request: Generation) -> str:
    return f"{served.tiny.name}: request {request.request_id!r}"
