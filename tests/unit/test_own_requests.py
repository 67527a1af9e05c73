"""Requests of other classes than ours decode in a batch like ours, however their attributes are read and written."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpool import BlockHasher, KVCacheManager, Request, UsageError
from kvpool.core.late import late_name, written_late
from kvpool.replay.named import NamedRequest


class Own:
    """All that the cache asks of a request; its names are numbers."""

    reads_cache = True
    num_encoder_tokens = 0
    num_preemptions = 0
    max_tokens: int | None = None

    def __init__(self) -> None:
        self.request_id = "own"
        self.token_ids = [0, 1, 2, 3, 4]
        self.num_prompt_tokens = 5

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def block_hashes(self, hasher: BlockHasher, _next_block: bytes | None = None, /) -> Sequence[int]:
        return range(1, 1 + len(self.token_ids) // hasher.block_size)

    def plain_name(self, _hasher: BlockHasher, _num_blocks: int = 1, /) -> int | None:
        return None


@written_late("token_ids")
class Late(Own):
    def __init__(self) -> None:
        self.keeper = None
        super().__init__()


@written_late("token_ids")
class LateWithSlots:
    """No room for a keeper."""

    __slots__ = ("num_prompt_tokens", "request_id", "token_ids")
    reads_cache, num_encoder_tokens, num_preemptions, max_tokens = True, 0, 0, None
    block_hashes, plain_name = Own.block_hashes, Own.plain_name

    def __init__(self) -> None:
        self.request_id, self.token_ids, self.num_prompt_tokens = "own", [0, 1, 2, 3, 4], 5

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Ours(Request):
    def __init__(self) -> None:
        super().__init__("ours", range(5))


class WithPayload(Ours):
    """Attributes of its payload show through."""

    def __init__(self) -> None:
        self.payload = {"user": "u"}
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("payload", {}):
            return self.payload[name]
        raise AttributeError(name)


class WithTokensElsewhere(Ours):
    @property
    def token_ids(self) -> list[int]:
        return self._elsewhere

    @token_ids.setter
    def token_ids(self, token_ids: list[int]) -> None:
        self._elsewhere = token_ids


class WithKeeperElsewhere(Ours):
    @property
    def keeper(self) -> None:
        return None

    @keeper.setter
    def keeper(self, keeper: Any) -> None:
        pass


class Frozen(Ours):
    """What was set once stays."""

    def __delattr__(self, name: str) -> None:
        raise AttributeError(name)


EAGER: list[Callable[[], Any]] = [
    Own, LateWithSlots, WithPayload, WithTokensElsewhere, WithKeeperElsewhere, Frozen
]  # fmt: skip
LATE: list[Callable[[], Any]] = [Late, Ours, lambda: NamedRequest("named", 5, [7], 4, serial=1)]


@pytest.mark.parametrize("make", [*EAGER, *LATE])
def test_a_request_of_any_class_is_up_to_date_when_it_is_read(make: Callable[[], Any]) -> None:
    cache = KVCacheManager(30, 4)
    batch, request, other = cache.decode_batch(), make(), Request("other", range(5))
    for one in (request, other):
        cache.allocate(one, 5)
        cache.join(batch, one)
    tokens = [*request.token_ids]
    for token in range(20):
        assert cache.serve(batch)
        cache.step(batch, [token, 1])
        if token % 3:
            assert request.token_ids == [*tokens, *range(token + 1)]
            assert request.num_tokens == 6 + token
    cache.leave(batch, [request])
    cache.step(batch, [7])
    assert request.num_tokens == 25
    cache.free(request)
    cache.check()


@pytest.mark.parametrize(("requests", "is_late"), [(EAGER, False), (LATE, True)])
def test_what_could_not_be_missed_is_not_taken_away(requests: list[Callable[[], Any]], is_late: bool) -> None:
    assert [late_name(make()) is not None for make in requests] == [is_late] * len(requests)


def test_an_attribute_of_a_payload_shows_through_while_it_decodes() -> None:
    cache, request = KVCacheManager(30, 4), WithPayload()
    batch = cache.decode_batch()
    cache.allocate(request, 5)
    cache.join(batch, request)
    assert cache.serve(batch)
    cache.step(batch, [1])
    assert (request.user, request.num_tokens) == ("u", 6)


@pytest.mark.parametrize("tokens", [(1, 2, 3), [[1, 2, 3]], None])
def test_tokens_that_are_not_one_list_are_refused_when_it_joins(tokens: Any) -> None:
    """None stands for a list that is made anew at each reading."""

    class Odd(Own):
        @property
        def token_ids(self) -> Any:
            return [1, 2, 3] if tokens is None else tokens

        @token_ids.setter
        def token_ids(self, _given: list[int]) -> None:
            pass

    cache, request = KVCacheManager(30, 4), Odd()
    batch = cache.decode_batch()
    cache.allocate(request, 5)
    with pytest.raises(UsageError, match=r"request 'own': .*token.ids"):
        cache.join(batch, request)
    assert len(batch) == 0
    cache.free(request)
    cache.check()


@pytest.mark.parametrize("max_tokens", [2**63 - 1, 2**63, 2**70])
def test_a_limit_may_be_any_number(max_tokens: int) -> None:
    cache, request = KVCacheManager(30, 4), Request("r", range(5), max_tokens=max_tokens)
    batch = cache.decode_batch()
    cache.allocate(request, 5)
    cache.join(batch, request)
    cache.step(batch, [1])
    assert batch.ending_rows() == []
    cache.check()
