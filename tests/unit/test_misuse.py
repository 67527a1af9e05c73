"""Every misuse of the cache is refused with its numbers and changes nothing; and `check()` finds broken tables."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvpool import Hit, HitEnd, Request, UsageError
from kvpool.core.block_table import BlockTable
from kvpool.testing import MirroredCache

STALE = Hit(8, ([4, 5],), HitEnd.LAST_TOKEN)
OF_LIVE = Hit(4, ([1],), HitEnd.LAST_TOKEN)


@dataclass
class Scene:
    """`live` holds blocks 1 2 3, two of them published; `old` was freed; `decoding` is in the batch.

    `full` has no slot for its last token, `far` none for its last two.
    """

    mirror: MirroredCache = field(default_factory=lambda: MirroredCache(12, 4))
    live: Request = field(default_factory=lambda: Request("live", range(9)))
    old: Request = field(default_factory=lambda: Request("old", range(50, 54)))
    full: Request = field(default_factory=lambda: Request("full", range(70, 74)))
    far: Request = field(default_factory=lambda: Request("far", range(80, 84)))
    decoding: Request = field(default_factory=lambda: Request("decoding", range(90, 95)))
    new: Request = field(default_factory=lambda: Request("new", range(9)))
    twin: Request = field(default_factory=lambda: Request("live", range(9)))

    def __post_init__(self) -> None:
        self.cache = self.mirror.cache
        self.batch = self.mirror.batch
        for request in (self.live, self.old, self.full, self.far, self.decoding):
            assert self.mirror.allocate(request, request.num_tokens)
            self.mirror.commit(request, request.num_tokens)
        self.mirror.free(self.old)
        self.full.append(7)
        self.far.token_ids += [7, 8]
        self.decoding.append(7)
        self.mirror.join(self.decoding)

    def table(self, request: Request) -> BlockTable:
        table = self.cache.table(request)
        assert table is not None
        return table

    def _requests(self) -> list[Request]:
        return [self.live, self.old, self.full, self.far, self.decoding, self.new, self.twin]

    def num_tokens(self) -> list[int]:
        return [request.num_tokens for request in self._requests()]


@pytest.fixture
def scene() -> Scene:
    return Scene()


MISUSES: dict[str, tuple[Callable[[Scene], object], str]] = {
    "free twice": (lambda s: s.cache.free(s.old), "'old' holds no blocks: it was freed, or never allocated"),
    "free before allocate": (lambda s: s.cache.free(s.new), "'new' holds no blocks"),
    "free a twin": (lambda s: s.cache.free(s.twin), "another live request has the id 'live'"),
    "commit after free": (lambda s: s.cache.commit(s.old, 4), "'old' holds no blocks"),
    "commit a twin": (lambda s: s.cache.commit(s.twin, 9), "another live request has the id 'live'"),
    "commit beyond the tokens": (
        lambda s: s.cache.commit(s.live, 10),
        "'live': 10 tokens committed; 9 were computed before, 12 are allocated, it has 9",
    ),
    "commit beyond the slots": (
        lambda s: s.cache.commit(s.full, 5),
        "'full': 5 tokens committed; 4 .* 4 are allocated",
    ),
    "commit fewer": (lambda s: s.cache.commit(s.live, 8), "'live': 8 tokens committed; 9 were computed before"),
    "commit a negative number": (lambda s: s.cache.commit(s.live, -1), "'live': -1 tokens committed"),
    "allocate nothing": (lambda s: s.cache.allocate(s.new, 0), "'new' asks for room for 0 tokens"),
    "allocate less": (lambda s: s.cache.allocate(s.new, -1), "'new' asks for room for -1 tokens"),
    "allocate less beside a hit": (
        lambda s: s.cache.allocate(s.new, -1, s.cache.match(s.new)),
        "'new' asks for room for -1 tokens",
    ),
    "grow by nothing": (lambda s: s.cache.allocate(s.live, 0), "'live' asks for room for 0 tokens"),
    "grow by less": (lambda s: s.cache.allocate(s.live, -4), "'live' asks for room for -4 tokens"),
    "grow a twin": (lambda s: s.cache.allocate(s.twin, 1), "another live request has the id 'live'"),
    "grow with a hit": (
        lambda s: s.cache.allocate(s.live, 1, s.cache.match(s.live)),
        "'live' holds blocks already: hits and external tokens come with its first allocation",
    ),
    "a stale hit": (lambda s: s.cache.allocate(s.new, 1, STALE), "'new': the hit is stale or of another request"),
    "the hit of another": (
        lambda s: s.cache.allocate(s.old, 1, OF_LIVE),
        "'old': the hit is stale or of another request",
    ),
    "step without blocks": (lambda s: s.cache.step([s.live, s.old], [1, 2]), "'old' holds no blocks"),
    "step without room": (lambda s: s.cache.step([s.live, s.full], [1, 2]), "'full' has no room for its last token"),
    "step without room for more": (
        lambda s: s.cache.step([s.live, s.far], [1, 2]),
        "'far' has 6 tokens and room for 4: allocate for it",
    ),
    "step twice": (lambda s: s.cache.step([s.live, s.live], [1, 2]), "1 of 2 requests come twice in one step"),
    "step a twin": (lambda s: s.cache.step([s.twin], [1]), "another live request has the id 'live'"),
    "step with too few tokens": (lambda s: s.cache.step([s.live], []), "1 requests and 0 tokens"),
    "step with too many tokens": (lambda s: s.cache.step([s.live], [1, 2]), "1 requests and 2 tokens"),
    "join without blocks": (lambda s: s.cache.join(s.batch, s.new), "'new' holds no blocks"),
    "join a twin": (lambda s: s.cache.join(s.batch, s.twin), "another live request has the id 'live'"),
    "join without room": (lambda s: s.cache.join(s.batch, s.far), "'far' has 6 tokens and room for 4"),
    "join twice": (lambda s: s.cache.join(s.batch, s.decoding), "'decoding' decodes in a batch"),
    "free in a batch": (lambda s: s.cache.free(s.decoding), "'decoding' decodes in a batch"),
    "commit in a batch": (lambda s: s.cache.commit(s.decoding, 5), "'decoding' decodes in a batch"),
    "grow in a batch": (lambda s: s.cache.allocate(s.decoding, 1), "'decoding' decodes in a batch"),
    "step alone in a batch": (lambda s: s.cache.step([s.decoding], [1]), "'decoding' decodes in a batch"),
    "leave alone": (lambda s: s.cache.leave(s.batch, [s.decoding, s.live]), "'live' leaves a batch that it is not in"),
    "leave without blocks": (lambda s: s.cache.leave(s.batch, [s.old]), "'old' leaves a batch that it is not in"),
    "step a batch with too few tokens": (lambda s: s.cache.step(s.batch, []), "1 requests and 0 tokens"),
    "step a batch with a negative token": (
        lambda s: s.cache.step(s.batch, [-1]),
        r"token ids are whole numbers of 0 .. 2\*\*63 - 1, not -1",
    ),
    "step with a negative token": (
        lambda s: s.cache.step([s.live], [-1]),
        r"token ids are whole numbers of 0 .. 2\*\*63 - 1, not -1",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_refused_and_changes_nothing(scene: Scene, misuse: str) -> None:
    call, message = MISUSES[misuse]
    num_tokens = scene.num_tokens()
    with pytest.raises(UsageError, match=message):
        call(scene)
    scene.mirror.check()
    assert scene.num_tokens() == num_tokens


# -- check() finds planted corruption of tables


def _share_a_block(s: Scene) -> None:
    s.table(s.live).block_ids[0][2] = s.table(s.decoding).block_ids[0][1]


def _share_a_named_block(s: Scene) -> None:
    s.table(s.live).block_ids[0][2] = s.table(s.full).block_ids[0][0]


def _exchange_blocks(s: Scene) -> None:
    live, full = s.table(s.live).block_ids[0], s.table(s.full).block_ids[0]
    live[0], full[0] = full[0], live[0]


def _swap_blocks(s: Scene) -> None:
    s.table(s.live).block_ids[0][:2] = [2, 1]


def _compute_more_than_allocated(s: Scene) -> None:
    s.table(s.live).num_computed = 13


def _commit_more_than_computed(s: Scene) -> None:
    s.table(s.live).num_committed = 12


def _lose_a_slot(s: Scene) -> None:
    s.table(s.live).num_slots -= 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_share_a_block, "invariant 1: holders"),
        (_share_a_named_block, "invariant 3: blocks .* have a name before they are committed"),
        (_exchange_blocks, "invariant 9: .* holds foreign content"),
        (_swap_blocks, "invariant 9: .* holds foreign content"),
        (_compute_more_than_allocated, "invariant 6: "),
        (_commit_more_than_computed, "invariant 6: "),
        (_lose_a_slot, "invariant 7: "),
    ],
)
def test_check_finds(scene: Scene, corrupt: Callable[[Scene], None], message: str) -> None:
    scene.cache.check()
    corrupt(scene)
    with pytest.raises(AssertionError, match=message):
        scene.cache.check()
