"""The calls of the model that make a step."""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served
from tests.runner.tiny_models import CONFIGS, tiny
from torch import nn

from kvpool.engine.step_input import StepInput
from kvpool.runner.forward import Forward, forwards
from kvpool.runner.packing import few_tokens, pack, packed_bytes

CPU = torch.device("cpu")


def step_of(starts: Sequence[int], counts: Sequence[int], num_decoding: int) -> StepInput:
    """Rows on blocks of 4, one behind the other."""
    positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    rows = np.repeat(np.arange(len(counts)), counts)
    table = 1 + np.arange(8 * len(counts), dtype=np.int32).reshape(-1, 8)
    slots = table[rows, positions // 4] * 4 + positions % 4
    return StepInput(
        np.arange(len(positions)) + 7, positions, np.array(counts), num_decoding, slots[None].astype(np.int64),
        (table,), np.ones(len(counts), bool),
    )  # fmt: skip


PACKED = frozenset({1, 2, 3})


def calls(step: StepInput, few: frozenset[int] = PACKED, *, has_states: bool = False) -> list[Forward]:
    return list(forwards(step, CPU, few, has_states=has_states, is_gradual=False))


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 4), (2, 4), (3, 4), (4, 4), (5, 5)])
@pytest.mark.parametrize("has_states", [False, True])
def test_a_few_decodes_are_filled_up_to_four(num_rows: int, num_tokens: int, has_states: bool) -> None:
    """What is added goes to the null block, and is nobody's."""
    [call] = calls(step_of(range(9, 9 + num_rows), [1] * num_rows, num_rows), has_states=has_states)
    assert call.num_tokens == num_tokens
    assert len(call.chunks) == call.num_decoding == num_rows
    assert call.token_ids[num_rows:].tolist() == [0] * (num_tokens - num_rows)
    blocks, _ = call.places(0, 4)
    assert (blocks[:num_rows] > 0).all()
    assert (blocks[num_rows:] == 0).all()


def test_so_is_a_short_chunk_but_not_where_it_would_change_a_state() -> None:
    step = step_of([4], [3], 0)
    assert [call.num_tokens for call in calls(step)] == [4]
    assert [call.num_tokens for call in calls(step, has_states=True)] == [3]


def test_who_is_filled_up() -> None:
    model = deepcopy(tiny("llama").stock)
    assert few_tokens(model) == {2, 3}
    pack(model)
    assert few_tokens(model) == ({1, 2, 3} if packed_bytes(model) else {2, 3})
    assert few_tokens(nn.Linear(1, 1, device="meta")) == set()
    assert [call.num_tokens for call in calls(step_of([4, 9], [1, 1], 2), frozenset())] == [2]


def test_models_with_states_get_decodes_together_and_chunks_alone() -> None:
    step = step_of([9, 5, 0, 4], [1, 1, 5, 2], 2)
    both, first, second = calls(step, has_states=True)
    assert (both.is_stacked, both.num_decoding, [chunk.row for chunk in both.chunks]) == (True, 2, [0, 1])
    assert first.token_ids.tolist() == [9, 10, 11, 12, 13]
    assert second.positions.tolist() == [4, 5]
    gradual = list(forwards(step, CPU, PACKED, has_states=True, is_gradual=True))
    assert [call.token_ids.tolist() for call in gradual[1:]] == [[9, 10, 11, 12, 13], [14], [15]]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_requests", [2, 3])
def test_two_or_three_requests_are_right(name: str, num_requests: int) -> None:
    """All alone, and one that goes on when the others are through."""
    served = Served(tiny(name))
    requests = [served.add(f"{number}", range(5 + number, 30), 4 + 3 * number) for number in range(num_requests)]
    served.finish()
    stock.check(served, requests)
