"""A request to a model: its tokens, and how the next ones are chosen.

Knows nothing of: texts.
"""

from collections.abc import Collection
from secrets import randbits
from typing import Any

from kvpool.core.request import Request
from kvpool.engine.sampling import GREEDY, SamplingParams
from kvpool.types import RequestId


class Generation(Request):
    """A `Request` with `sampling`, and with the tokens that end it: `stop_token_ids` (the last of its outputs then).

    `seed` is that of `sampling`, or one made for this request. Keywords are those of `Request`.
    """

    __slots__ = ("sampling", "seed", "stop_token_ids")

    def __init__(
        self,
        request_id: RequestId,
        prompt: Any,
        sampling: SamplingParams = GREEDY,
        *,
        stop_token_ids: Collection[int] = (),
        **keywords: Any,
    ) -> None:
        if sampling.num_prompt_logprobs is not None:
            keywords["reads_cache"] = False
        super().__init__(request_id, prompt, **keywords)
        self.sampling = sampling
        self.seed = randbits(62) if sampling.seed is None else sampling.seed
        self.stop_token_ids = frozenset(stop_token_ids)
