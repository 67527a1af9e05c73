"""What a cache of several groups should do, layer by layer and token by token: tests only.

Shares no code with the core. A prefix can be hit if all that its next token looks at is published; a block is let go of
when no token to come looks at it; what is read must have been written. All is worked out when it is asked.

Owns: who holds a block, what was written into it and on top of what, under which name it is published, the free queue.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from math import gcd, lcm

from tests.model.layers import Content, Expected, Layers, Prefixes, Record, Run
from tests.model.wanted import Wanted

from kvpool import BlockHasher, LayerKind, Request


class Oracle:
    """The same verbs as `KVCacheManager`. It expects calls that keep the protocol, and never changes a request."""

    def __init__(
        self,
        num_blocks: int,
        kinds: Sequence[LayerKind],
        publication: str | int,
        drops_last_block: bool,
        hasher: BlockHasher,
    ) -> None:
        self.groups = [Layers(at, kind, kind.block_size or 1) for at, kind in enumerate(kinds)]
        self.decoder = [g for g in self.groups if not g.is_encoder]
        asked = sorted(self.decoder, key=lambda g: not g.is_full)
        self.asked_first = [g for g in asked if (g.kind, g.size) == (asked[0].kind, asked[0].size)]
        self.unit, self.alignment = gcd(*[g.size for g in asked]), lcm(*[g.size for g in asked])
        self.num_dropped = self.alignment if drops_last_block else 0
        self.is_ranked = publication == "ranked"
        self.wanted = Wanted(publication, self.alignment, self.num_dropped)
        self.front = list(range(1, num_blocks))
        self.back: list[int] = []
        self.holders = [0] * num_blocks
        self.content: list[Content | None] = [None] * num_blocks
        self.published: dict[tuple[int, int], list[int]] = {}
        self.records: dict[str, Record] = {}
        self.num_evictions = 0
        self.seen: set[int] = set()
        """Prefixes up to a common border that somebody computed, or brought from outside, since the last clear."""
        self._hasher = hasher
        self._prefixes = Prefixes()

    @property
    def free_list(self) -> list[int]:
        """First to be reused first: empty and spare blocks in front, those worth keeping at the back."""
        return self.front + self.back

    def pids(self, request: Request) -> list[int]:
        return self._prefixes.pids(request)

    def align(self, n: int) -> int:
        return n // self.alignment * self.alignment

    # -- finding

    def match(self, request: Request, limit: int) -> Expected:
        """Every length is tried, from the top."""
        pids = self.pids(request)
        lengths = range(self.align(min(limit, request.num_tokens)), 0, -self.alignment)
        found = next((n for n in lengths if all(self._serves(g, pids, n) for g in self.decoder)), 0)
        shared = next((n for n in lengths if all(self._serves(g, pids, n) for g in self.asked_first)), 0)
        if not self.asked_first[0].is_full:
            borders = range(self.alignment, lengths.start + 1 if lengths else 1, self.alignment)
            seen = sum(1 for _ in takewhile(lambda n: pids[n] in self.seen, borders)) * self.alignment
            shared = max(found, seen)
        hit = max(found - self.num_dropped, 0)
        return Expected(hit, found, shared, [self._found_ids(g, pids, hit) for g in self.groups])

    def _serves(self, g: Layers, pids: Sequence[int], n: int) -> bool:
        needed = g.blocks_of_hit(n, self.num_dropped)
        return all((g.group_id, pids[(index + 1) * g.size]) in self.published for index in needed)

    def _found_ids(self, g: Layers, pids: Sequence[int], n: int) -> list[int]:
        if g.is_encoder:
            return []
        ids = [0] * (n // g.size)
        for index in g.blocks_looked_at(n):
            ids[index] = self.published[g.group_id, pids[(index + 1) * g.size]][0]
        return ids

    # -- room

    def num_needed(self, request: Request, ids: list[list[int]], start: int, stop: int, ahead: int = 0) -> int:
        """How many blocks leave the free queue: new ones, and those of a hit that nobody holds."""
        new = sum(len(self._new_places(g, own, request, start, stop, ahead)) for g, own in self._with(ids))
        if request.request_id in self.records:
            return new
        idle = sum(block > 0 and not self.holders[block] for own in ids for block in own)
        return new + idle + sum(g.num_scratch for g in self.groups)

    def first_blocks(self, ids: list[list[int]], start: int) -> list[list[int]]:
        """Those of a hit that are looked at from token `start` on; tokens from outside come before it."""
        return [
            [0 if g.is_dead(index, start) and not g.is_encoder else block for index, block in enumerate(own)]
            for g, own in self._with(ids)
        ]

    def _with(self, ids: list[list[int]]) -> Iterable[tuple[Layers, list[int]]]:
        return zip(self.groups, ids, strict=True)

    def _new_places(
        self, g: Layers, own: list[int], request: Request, start: int, stop: int, ahead: int
    ) -> Sequence[int]:
        """Where a step that computes tokens start .. stop - 1 lacks a block in the group."""
        if g.is_encoder:
            return range(len(own), g.num_blocks(request.num_encoder_tokens))
        places = range(len(own), g.num_blocks(stop + ahead))
        if g.is_state:
            return [i for i in places if i >= (stop - 1) // g.size or i in g.blocks_looked_at(start)]
        return [i for i in places if not g.is_dead(i, start)]

    def admit(self, request: Request, hit: Expected, external: int, num_tokens: int, ahead: int = 0) -> bool:
        """Whether there was room; if not, nothing changed."""
        start = hit.num_tokens + external
        ids = self.first_blocks(hit.ids, start)
        if self.num_needed(request, ids, start, start + num_tokens, ahead) > len(self.front) + len(self.back):
            return False
        for block in [block for own in ids for block in own if block]:
            self._touch(block)
        run = Run(self.pids(request), hit.num_tokens, self._bases(ids))
        boundaries = self.wanted.boundaries(request, hit)
        record = Record(request, run, ids, start, boundaries, hit.num_tokens, hit.num_tokens)
        record.stops.add(hit.num_tokens)
        self.records[request.request_id] = record
        self._grow(record, start, start + num_tokens, ahead)
        record.scratch = [self._take() for g in self.groups for _ in range(g.num_scratch)]
        return True

    def _touch(self, block: int) -> None:
        if not self.holders[block]:
            (self.front if block in self.front else self.back).remove(block)
        self.holders[block] += 1
        content = self.content[block]
        assert content is not None
        content.is_spare = False

    def _bases(self, ids: list[list[int]]) -> list[tuple[Run, int]]:
        contents = [content for own in ids for block in own if (content := self.content[block])]
        assert not any(content.is_bad for content in contents), "a hit returns content that depends on a bad block"
        return [(content.run, content.end) for content in contents]

    def allocate(self, request: Request, num_tokens: int, ahead: int = 0) -> bool:
        """Room for a live request. Whether there was; if not, nothing changed but what slid out."""
        record = self.records[request.request_id]
        self._slide(record, num_tokens + ahead)
        start, stop = record.computed, record.computed + num_tokens
        if self.num_needed(request, record.ids, start, stop, ahead) > len(self.front) + len(self.back):
            return False
        self._grow(record, start, stop, ahead)
        return True

    def _slide(self, record: Record, num_tokens: int) -> None:
        """Ranked, a request that goes on token by token keeps what its last common border needs."""
        keeps_border = self.wanted.is_ranked and num_tokens == 1 and self.unit == self.alignment
        end = self.align(record.computed) if keeps_border else record.computed
        for g, own in self._with(record.ids):
            if not g.is_encoder:
                dead = [i for i, block in enumerate(own) if block and g.is_dead(i, end)]
                self._let_go(own[i] for i in reversed(dead))
                for i in dead:
                    own[i] = 0

    def _grow(self, record: Record, start: int, stop: int, ahead: int) -> None:
        for g, own in self._with(record.ids):
            for index in self._new_places(g, own, record.request, start, stop, ahead):
                own += [0] * (index - len(own))
                own.append(self._take())
                self.content[own[-1]] = Content(record.run, g, 0 if g.is_encoder else index * g.size)
            if not g.is_encoder:
                own += [0] * (g.num_blocks(stop) - len(own))

    def _take(self) -> int:
        block = (self.front or self.back).pop(0)
        self.num_evictions += self.withdraw(block)
        self.holders[block], self.content[block] = 1, None
        return block

    def _let_go(self, blocks: Iterable[int]) -> None:
        """In this order: those without a name come first in the free queue, spare ones next, others last."""
        empty: list[int] = []
        for block in filter(None, blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                content = self.content[block]
                is_empty = content is None or content.name is None
                where = empty if is_empty else self.front if content and content.is_spare else self.back
                where.append(block)
        self.front = empty + self.front

    def cut(self, record: Record, n: int) -> None:
        """Blocks wholly behind the first n tokens are given back, tail first."""
        for g, own in self._with(record.ids):
            if not g.is_encoder:
                self._let_go(reversed(own[g.num_blocks(n) :]))
                del own[g.num_blocks(n) :]

    def trim(self, request: Request) -> None:
        record = self.records[request.request_id]
        self.cut(record, max(request.num_tokens, record.computed))

    def free(self, request: Request) -> None:
        record = self.records.pop(request.request_id)
        if self.is_ranked:
            self._publish_end(record)
        for own in record.ids:
            self._let_go(reversed(own))
        self._let_go(record.scratch)

    # -- content

    def commit(self, request: Request, n: int) -> int:
        """All before n is written, what that looks at is read. How many blocks became findable."""
        record = self.records[request.request_id]
        self.pids(request)
        outside = min(record.outside, n)
        if outside > record.computed:
            self._write(record, record.computed, outside, is_external=True)
            record.computed = outside
        if n > record.computed:
            self._read(record, record.computed)
            self._write(record, record.computed, n, is_external=False)
            record.computed = n
        record.stops.add(n)
        return self._publish_computed(record)

    def _read(self, record: Record, n: int) -> None:
        """What the token at position n looks at must be there, as this request would have written it."""
        for g in self.decoder:
            for index in g.blocks_looked_at(n):
                content = self.content[record.ids[g.group_id][index]]
                end = n if g.is_state else min(n, (index + 1) * g.size)
                where = f"token {n} of {record.request.request_id} looks at block {index} of group {g.group_id}"
                assert content is not None, f"{where}: nothing is kept there"
                assert content.is_of(record.pids, end), f"{where}: it holds something else, up to {content.end}"

    def _write(self, record: Record, start: int, stop: int, is_external: bool) -> None:
        for g in self.decoder:
            own = record.ids[g.group_id]
            first = (stop - 1 if g.is_state else start) // g.size
            for index in range(first, g.num_blocks(stop)):
                content = self.content[own[index]]
                if content is None:
                    assert is_external, f"no block to write: {index} of {record}"
                    assert g.is_dead(index, stop), f"what comes from outside has no block: {index} of {record}"
                    continue
                assert content.run is record.run, f"block {own[index]} is written, and is another request's"
                assert content.name is None, f"block {own[index]} is written, and can be found"
                assert self.holders[own[index]] == 1, f"block {own[index]} is written, and shared"
                content.end = min((index + 1) * g.size, stop)

    # -- publishing

    def _publish_computed(self, record: Record) -> int:
        start, stop = record.committed, self.align(record.computed)
        record.committed = stop
        self.seen.update(record.pids[n] for n in range(start + self.alignment, stop + 1, self.alignment))
        count = 0
        for g in self.decoder if start < stop else ():
            for index in range(start // g.size, stop // g.size):
                is_kept = self.wanted.is_kept(record, g, index)
                if is_kept or self.wanted.is_published(record, g, index):
                    count += self._publish(record, g, index, is_spare=not is_kept and self.is_ranked)
        return count

    def _publish_end(self, record: Record) -> None:
        for g in self.decoder:
            for index in self.wanted.end(record, g):
                content = self.content[record.ids[g.group_id][index]]
                if content and content.end == (index + 1) * g.size:
                    self._publish(record, g, index, is_spare=False)
                    content.is_spare = False

    def _publish(self, record: Record, g: Layers, index: int, is_spare: bool) -> bool:
        block = record.ids[g.group_id][index]
        content = self.content[block]
        end = (index + 1) * g.size
        if content is None or content.name:
            return False
        assert content.is_of(record.pids, end), f"block {block} becomes findable, and is not what its name says"
        assert not content.is_bad, f"block {block} becomes findable, and depends on a bad block"
        content.name, content.is_spare = (g.group_id, record.pids[end]), is_spare
        content.digest = record.request.block_hashes(self._hasher)[end // self.unit - 1]
        self.published.setdefault(content.name, []).append(block)
        return True

    def withdraw(self, block: int) -> bool:
        """The block cannot be found any more. Whether it could."""
        content = self.content[block]
        if content is None or content.name is None:
            return False
        self.published[content.name].remove(block)
        if not self.published[content.name]:
            del self.published[content.name]
        content.name = None
        return True

    def forget(self, blocks: Sequence[int]) -> None:
        """These cannot be found any more; the free ones are the next to be reused, in this order."""
        for block in blocks:
            self.withdraw(block)
        idle = [block for block in blocks if not self.holders[block]]
        self.front = idle + [block for block in self.front if block not in idle]
        self.back = [block for block in self.back if block not in idle]

    def clear(self) -> bool:
        """False, and nothing changed, while any request holds blocks."""
        for block in range(0 if any(self.holders) else len(self.content)):
            self.withdraw(block)
        self.seen = self.seen if any(self.holders) else set()
        return not any(self.holders)
