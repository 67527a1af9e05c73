"""How the next token of a request is chosen.

Knows nothing of: logits, and who computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.errors import UsageError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The token with the largest logit where `temperature` is 0; else one drawn from the most likely ones.

    `top_p`: of those that together have this probability; `top_k`: of so many, 0 for all. A `seed` makes the draws
    repeatable: output i of a request depends on its seed and i alone, however it is batched, preempted or cached.
    `num_logprobs` most likely tokens are told with their log-probabilities beside the chosen one's; None tells none.
    `num_prompt_logprobs` is the same for every token of the prompt but the first; such a request does not read the
    cache, since a token that is not computed has no logits. UsageError for a value out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(
                f"temperature is {self.temperature}: 0 for the likeliest token, or above, 2 at most in use"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}: a share above 0 and up to 1")
        if not 0 <= self.top_k < 2**31:
            raise UsageError(f"top_k is {self.top_k}: 0 for all tokens, or how many, below 2**31")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}: 0 to 2**63 - 1")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                raise UsageError(f"{name} is {count}: 0 to {MOST_LOGPROBS}, or None for none at all")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken and nothing is told of others."""
        return self.temperature == 0 and self.num_logprobs is None and self.num_prompt_logprobs is None


MOST_LOGPROBS = 20
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities at one place: of the token that stands there, and of the likeliest ones.

    Before temperature, top_p and top_k are applied. `top` is sorted, the likeliest first.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
