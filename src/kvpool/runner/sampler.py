"""Next tokens from logits.

A row's draw depends on its logits, its seed and the number of its output alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpool.engine.sampling import Logprobs
from kvpool.engine.step_input import Ints, SamplingRows


def sample(logits: torch.Tensor, rows: Sequence[int], sampling: SamplingRows | None) -> torch.Tensor:
    """A token for each of these rows of a step: int64; `logits` (rows, vocabulary), in fp32."""
    likeliest = logits.argmax(-1)
    if sampling is None:
        return likeliest
    temperature = torch.from_numpy(sampling.temperature[rows]).to(logits.device)
    if not bool((temperature > 0).any()):
        return likeliest
    chances = torch.softmax(logits / temperature.clamp(min=1e-6)[:, None], -1)
    chances, tokens = chances.sort(dim=-1, descending=True, stable=True)
    below = chances.cumsum(-1) - chances
    top_p = torch.from_numpy(sampling.top_p[rows]).to(logits.device)[:, None]
    top_k = torch.from_numpy(sampling.top_k[rows]).to(logits.device)[:, None]
    rank = torch.arange(chances.shape[-1], device=logits.device)[None]
    # The likeliest stays, however small the share is.
    is_out = ((below >= top_p) & (rank > 0)) | ((top_k > 0) & (rank >= top_k))
    chances = chances.masked_fill(is_out, 0)
    sums = chances.double().cumsum(-1)
    points = torch.from_numpy(_uniform(sampling.seeds[rows], sampling.num_outputs[rows])).to(logits.device)
    places = torch.searchsorted(sums, points[:, None] * sums[:, -1:], right=True)
    drawn = tokens.gather(-1, places.clamp(max=chances.shape[-1] - 1))[:, 0]
    return torch.where(temperature > 0, drawn, likeliest)


def logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[Logprobs]:
    """Of these tokens, one in each row of logits, and of the likeliest ones."""
    logs = torch.log_softmax(logits.float(), -1)
    own = logs[torch.arange(len(token_ids)), torch.tensor(token_ids)].tolist()
    top, tokens = logs.topk(num_top, -1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(tokens.tolist(), top.tolist(), strict=True)]
    return [Logprobs(*each) for each in zip(token_ids, own, tops, strict=True)]


def _uniform(seeds: Ints, numbers: Ints) -> npt.NDArray[np.float64]:
    """A number from 0 to below 1 for each seed and number: SplitMix64 (Steele, Lea, Flood 2014), two rounds of it."""
    with np.errstate(over="ignore"):
        mixed = _mix(seeds.astype(np.uint64)) + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        points: npt.NDArray[np.float64] = (_mix(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return points


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
