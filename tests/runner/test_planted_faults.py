"""The comparison of logits sees what can go wrong: faults that are planted here are all found by it.

Attention that keeps everything cannot tell two blocks of earlier tokens apart; the check of tables can.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served, prompt_of
from tests.runner.spoiling import spoil
from tests.runner.tiny_models import CONFIGS, WITH_STATES, tiny

from kvpool.engine.generation import Generation
from kvpool.engine.step_input import StepBuilder, StepInput
from kvpool.runner import attention, forward, model_cache, torch_worker
from kvpool.runner.forward import Forward
from kvpool.runner.states import States

STATES = sorted(WITH_STATES)
TOKENS = [name for name in CONFIGS if name not in {"mamba", "mamba2"}]
POSITIONS = [name for name in TOKENS if name != "jamba"]
"""Jamba's attention knows no positions."""
WINDOWS = ["mistral", "gemma3_text", "gpt_oss"]


def begun(name: str, rng: random.Random, *, is_spoilt: bool = False) -> tuple[Served, Generation]:
    """A request that has one token more than its prompt of 45, and that one not computed."""
    served = Served(tiny(name), num_blocks=200)
    if is_spoilt:
        spoil(served)
    request = served.add("a", prompt_of(rng, 45), 8)
    while request.num_tokens == 45:
        served.step()
    return served, request


def page_and_place(served: Served, request: Generation, layer: int, part: int) -> Callable[[int], Any]:
    """The page of a layer that holds a token of the request, and its place there, by position."""
    [pages, place] = served.worker._cache._pages[layer], served.worker._cache._places.tokens[layer]

    def of(position: int) -> tuple[torch.Tensor, int]:
        table = served.cache.table(request)
        assert table is not None
        return pages[part][table.block_ids[place.group_id][position // place.block_size]], position % place.block_size

    return of


def overwrite(page: torch.Tensor, place: int, value: torch.Tensor) -> None:
    with torch.inference_mode():
        page[place] = value


def layers(served: Served) -> list[int]:
    return sorted(served.worker._cache._pages)


def is_seen(served: Served, request: Generation) -> bool:
    served.finish()
    return not stock.is_right(served, request)


# -- values


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_stale_value(name: str, part: int, rng: random.Random) -> None:
    """One token of one layer has what the token before it had."""
    served, request = begun(name, rng)
    of = page_and_place(served, request, layers(served)[0], part)
    (page, place), (before, its_place) = of(44), of(43)
    overwrite(page, place, before[its_place])
    assert is_seen(served, request)


@pytest.mark.parametrize("name", TOKENS)
def test_a_value_of_another_request(name: str, rng: random.Random) -> None:
    """V of one token, in one layer."""
    served, request = begun(name, rng)
    other = served.add("b", prompt_of(rng, 45), 8)
    while other.num_tokens == 45:
        served.step()
    layer, last = layers(served)[-1], request.num_tokens - 2
    (page, place), (its_page, its_place) = (
        page_and_place(served, one, layer, 1)(position) for one, position in ((request, last), (other, 44))
    )
    overwrite(page, place, its_page[its_place])
    assert is_seen(served, request)
    assert stock.is_right(served, other)


# -- positions and places


def change_calls(monkeypatch: pytest.MonkeyPatch, change: Callable[[Forward], Forward]) -> None:
    def changed(*arguments: Any, **keywords: Any) -> Iterator[Forward]:
        return map(change, forward.forwards(*arguments, **keywords))

    monkeypatch.setattr(torch_worker, "forwards", changed)


def change_steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[StepInput], StepInput]) -> None:
    build = StepBuilder.build
    monkeypatch.setattr(StepBuilder, "build", lambda self, batch: change(build(self, batch)))


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_off_by_one(name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the outputs; were all positions too large by one, nobody could tell."""
    served, request = begun(name, rng)
    change_calls(monkeypatch, lambda call: replace(call, positions=call.positions + 1))
    assert is_seen(served, request)


@pytest.mark.parametrize("name", TOKENS)
def test_slots_off_by_one(name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    served, request = begun(name, rng)
    change_calls(monkeypatch, lambda call: replace(call, slots=call.slots - 1))
    assert is_seen(served, request)


def swap(first: int, second: int) -> Callable[[StepInput], StepInput]:
    """Two blocks of every row, in all groups."""

    def swapped(step: StepInput) -> StepInput:
        tables = tuple(table.copy() for table in step.block_tables)
        for table in tables:
            if table.shape[1] > max(first, second):
                table[:, [first, second]] = table[:, [second, first]]
        return replace(step, block_tables=tables)

    return swapped


@pytest.mark.parametrize("name", [name for name in TOKENS if name not in WITH_STATES])
def test_the_last_block_swapped(name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    served, request = begun(name, rng)
    change_steps(monkeypatch, swap(10, 11))
    assert is_seen(served, request)


@pytest.mark.parametrize("name", TOKENS)
def test_earlier_blocks_swapped(name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those that keep everything, and know no positions but those in the keys, the tables must tell."""
    served, _ = begun(name, rng, is_spoilt=True)
    change_steps(monkeypatch, swap(0, 1) if name not in WINDOWS else swap(9, 10))
    with pytest.raises(AssertionError, match=r"request 'a', group \d, position \d+"):
        served.finish()


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("where", ["chunks", "decodes"])
def test_a_window_off_by_one(
    name: str, by: int, where: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    def widened(window: int | None) -> int | None:
        return window + by if window is not None else None

    attend, plan = attention.attend_chunk, attention.plan_decode
    if where == "chunks":
        monkeypatch.setattr(
            f"{model_cache.__name__}.attend_chunk",
            lambda query, key, value, window, rule: attend(query, key, value, widened(window), rule),
        )
    else:
        monkeypatch.setattr(
            f"{forward.__name__}.plan_decode",
            lambda tables, lengths, size, window, dtype: plan(tables, lengths, size, widened(window), dtype),
        )
    served = Served(tiny(name), budget=20)
    [request] = served.run([prompt_of(rng, 45)])
    assert not stock.is_right(served, request)


# -- states


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_not_written(name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer, once."""
    served, request = begun(name, rng)
    end, skipped = States.end, list[int]()

    def skipping(self: States) -> None:
        if not skipped:
            skipped.append(min(self._now))
            del self._now[skipped[0]]
        end(self)

    monkeypatch.setattr(States, "end", skipping)
    assert is_seen(served, request)
    assert skipped


@pytest.mark.parametrize("name", STATES)
def test_a_wrong_checkpoint(name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit of two blocks goes on from the state after one."""
    unit = Served(tiny(name), block_size=16).unit
    served = Served(tiny(name), block_size=16, budget=unit, num_seqs=4)
    prompt = prompt_of(rng, 2 * unit + 9)
    served.run([prompt[: unit + 1], prompt], tag="cold")
    [warm] = served.run([prompt], tag="warm")
    assert stock.is_right(served, warm)
    blocks, wrong = States._blocks, list[int]()

    def older(self: States, layer: int, positions: list[int]) -> torch.Tensor:
        if positions != [2 * unit - 1]:
            return blocks(self, layer, positions)
        wrong.append(layer)
        hit = served.cache.match(Generation("asks", prompt[: unit + 1]))
        checkpoint = hit.block_ids[self._places[layer].group_id][-1]
        assert checkpoint, "the state after one block is kept"
        return torch.tensor([checkpoint])

    monkeypatch.setattr(States, "_blocks", older)
    [request] = served.run([prompt], tag="wrong")
    assert wrong
    assert not stock.is_right(served, request)


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_another_request(name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that decode go on from each other's states, in one layer."""
    served = Served(tiny(name))
    requests = [served.add(letter, prompt_of(rng, 45), 8) for letter in "ab"]
    while any(request.num_tokens == 45 for request in requests):
        served.step()
    get = States.get

    def crossed(self: States, layer: int, part: str) -> torch.Tensor | None:
        found = get(self, layer, part)
        return found.flip(0) if found is not None and layer == min(self._places) else found

    monkeypatch.setattr(States, "get", crossed)
    served.finish()
    assert not any(stock.is_right(served, request) for request in requests)
