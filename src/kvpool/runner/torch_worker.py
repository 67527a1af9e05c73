"""The worker that computes a model of transformers on pages.

Owns: the model, and the memory that block ids point into.
Knows nothing of: requests, texts, when to stop.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch

from kvpool.engine.sampling import Logprobs
from kvpool.engine.step_input import StepAnswer, StepInput
from kvpool.errors import ConfigError
from kvpool.plan.layout import Layout
from kvpool.runner.forward import Forward, forwards, num_filled_up
from kvpool.runner.model_cache import ATTENTION, PagedCache
from kvpool.runner.packing import few_tokens
from kvpool.runner.pages import KVMemory, Places
from kvpool.runner.refused import longest_alike, why_refused
from kvpool.runner.sampler import logprobs, sample

_GRADUAL = frozenset({"mamba", "falcon_mamba", "jamba"})
"""Models that transformers 5.24 computes wrongly where several tokens go on from a state: off by up to 0.04."""
Watch = Callable[[torch.Tensor, Sequence[int]], object]
"""Gets the logits of a step and their rows, for tests."""


class TorchWorker:
    """Runs `model` on `num_blocks` blocks of this layout.

    `kv_dtype` None keeps keys and values as the model makes them. `watch` gets the logits that tokens are chosen by.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        num_blocks: int,
        *,
        kv_dtype: torch.dtype | None = None,
        watch: Watch | None = None,
    ) -> None:
        kind = model.config.get_text_config(decoder=True).model_type
        if why := why_refused(model.config):
            raise ConfigError(f"a {kind} model {why}")
        self._model = model
        self._device = next(model.parameters()).device
        places = Places.of(layout)
        self.memory = KVMemory(num_blocks, layout.block_bytes, self._device)
        is_latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
        self._cache = PagedCache(self.memory, places, kv_dtype, returns_all=is_latent)
        self._has_states = bool(places.states)
        self._is_gradual = kind in _GRADUAL
        self._few = few_tokens(model)
        self._longest = longest_alike(model.config)
        self._watch = watch
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            raise ConfigError(f"a {kind} model computes its attention itself, so that it cannot read from pages")

    def execute(self, step: StepInput) -> StepAnswer:
        """The next token of every row that gives one."""
        if self._longest is not None and int(step.positions.max()) >= self._longest:
            raise ConfigError(
                f"a request has more than {self._longest:,} tokens, beyond which this model rotates all requests of a "
                "step in another way: bound their lengths by that"
            )
        logits: dict[int, torch.Tensor] = {}
        told: dict[int, list[Logprobs]] = {}
        with torch.inference_mode():
            calls = forwards(step, self._device, self._few, has_states=self._has_states, is_gradual=self._is_gradual)
            for forward in calls:
                self._compute(forward, step, logits, told)
            return self._answer(step, logits, told)

    def _compute(
        self, forward: Forward, step: StepInput, logits: dict[int, torch.Tensor], told: dict[int, list[Logprobs]]
    ) -> None:
        wanted = [_wanted(chunk.count, _num_prompt_logprobs(step, chunk.row) >= 0) for chunk in forward.chunks]
        keep = [chunk.at + place for chunk, places in zip(forward.chunks, wanted, strict=True) for place in places]
        found = iter(self._call(forward, keep))
        for chunk, places in zip(forward.chunks, wanted, strict=True):
            own = [next(found) for _ in places]
            logits[chunk.row] = own[-1]
            if len(places) == chunk.count and step.sampling is not None:
                first = int(step.counts[: chunk.row].sum())
                first += chunk.start - int(step.positions[first])
                targets = step.sampling.targets[first : first + chunk.count].tolist()
                rows = [(row, target) for row, target in zip(own, targets, strict=True) if target >= 0]
                if rows:
                    top = int(step.sampling.num_prompt_logprobs[chunk.row])
                    stacked = torch.stack([row for row, _ in rows])
                    told.setdefault(chunk.row, []).extend(logprobs(stacked, [target for _, target in rows], top))

    def _call(self, forward: Forward, keep: Sequence[int]) -> torch.Tensor:
        """The logits at these places, in fp32: (places, vocabulary), and maybe more behind."""
        keep = [*keep, *repeat(keep[-1], num_filled_up(len(keep), self._few) - len(keep))]
        shape = (-1, 1) if forward.is_stacked else (1, -1)
        self._cache.begin(forward)
        out = self._model(
            input_ids=forward.token_ids.view(shape),
            position_ids=forward.positions.view(shape),
            cache=self._cache,
            use_cache=False,
            logits_to_keep=0 if forward.is_stacked else torch.tensor(keep, device=self._device),
            paged=self._cache,
        )
        self._cache.end()
        logits: torch.Tensor = out.logits[:, 0] if forward.is_stacked else out.logits[0]
        return logits.float()

    def _answer(self, step: StepInput, logits: dict[int, torch.Tensor], told: dict[int, list[Logprobs]]) -> StepAnswer:
        rows = step.gives.nonzero()[0].tolist()
        tokens = np.full(step.num_rows, -1, np.int64)
        chosen: dict[int, Logprobs] = {}
        if rows:
            own = torch.stack([logits[row] for row in rows])
            if self._watch is not None:
                self._watch(own, rows)
            tokens[rows] = sample(own, rows, step.sampling).cpu().numpy()
            for place, row in enumerate(rows):
                count = -1 if step.sampling is None else int(step.sampling.num_logprobs[row])
                if count >= 0:
                    chosen[row] = logprobs(own[place : place + 1], [int(tokens[row])], count)[0]
        return StepAnswer(tokens, chosen, told)


def _num_prompt_logprobs(step: StepInput, row: int) -> int:
    return -1 if step.sampling is None else int(step.sampling.num_prompt_logprobs[row])


def _wanted(count: int, is_all: bool) -> Sequence[int]:
    """Of a row's tokens, those whose logits are needed."""
    return range(count) if is_all else (count - 1,)
