"""Random histories of one layout: legal calls in any order, as an engine would make them and worse.

Pools are small and prompts share their beginnings, so that shortage, eviction and hits happen all the time.
"""

import random
from collections.abc import Callable

from tests.model.group_pair import Live, Pair
from tests.model.layouts import LONGEST, Layout

from kvpool import EncoderInput, Request


class Walk:
    """One history. `log` says what was done."""

    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self.layout = layout
        self.rng = rng
        self.pair = Pair(layout, rng.choice([1, 10, 20]))
        self.families = [self._tokens(rng.randint(LONGEST // 4, LONGEST)) for _ in range(rng.randint(1, 2))]
        self.obeys = rng.random() < 0.7
        """Whether steps end where `step_end` says."""
        self.waiting: list[Request] = []
        self.num_requests = 0
        self.log: list[str] = [str(layout)]

    def run(self, num_operations: int) -> None:
        operations: dict[Callable[[], None], int] = {
            self.admit: 16, self.compute: 40, self.grow: 6, self.step: 6, self.join: 6, self.step_batch: 14,
            self.leave: 3, self.draft: 6, self.end: 4, self.preempt: 4, self.match: 3, self.invalidate: 2,
            self.clear: 1,
        }  # fmt: skip
        chosen = self.rng.choices(list(operations), list(operations.values()), k=num_operations)
        for index, operation in enumerate(chosen):
            operation()
            self.pair.check(index)

    def _note(self, text: str) -> None:
        self.log.append(text)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3) for _ in range(count)]

    @property
    def counts(self) -> "dict[str, int]":
        return self.pair.counts

    def _alone(self) -> list[Live]:
        return [live for live in self.pair.live.values() if not live.is_decoding]

    def _computed(self, live: Live) -> int:
        return self.pair.record(live).computed

    # -- coming and going

    def _new_request(self) -> Request:
        rng = self.rng
        family = rng.choice(self.families)
        tokens = family[: rng.choice([len(family), rng.randint(0, len(family)), rng.randint(0, len(family))])]
        tokens += self._tokens(rng.randint(0 if tokens else 1, 8))
        self.num_requests += 1
        encoder = EncoderInput(rng.choice("ef"), 5) if self.layout.has_encoder else None
        request = Request(
            f"r{self.num_requests}",
            tokens[:LONGEST],
            cache_salt=rng.choice("st") if rng.random() < 0.1 else None,
            encoder_input=encoder,
            reads_cache=rng.random() < 0.95,
            max_tokens=rng.choice([None, rng.randint(1, 30)]),
        )
        self._note(f"new {request.request_id} {request.token_ids} {request.cache_salt} {encoder} {request.max_tokens}")
        return request

    def admit(self) -> None:
        rng = self.rng
        is_resumed = bool(self.waiting) and rng.random() < 0.7
        request = self.waiting.pop(rng.randrange(len(self.waiting))) if is_resumed else self._new_request()
        found = self.pair.match(request, rng.choice([None, None, None, rng.randint(0, request.num_tokens)]))
        left = request.num_tokens - found[1].num_tokens
        external = rng.randint(0, left) if rng.random() < 0.15 else 0
        start = found[1].num_tokens + external
        count = rng.randint(0 if start else 1, left - external) if left > external else 0
        if count:
            count = self._step_end(request, start, start + min(count, self.layout.max_in_flight_tokens), found) - start
        self._note(f"admit {request.request_id}: hit {found[0]}, {external} external, {count} more")
        live = self.pair.admit(request, found, external, count)
        self.counts["admitted" if live else "refused"] += 1
        self.counts["external"] += live is not None and external > 0
        if live is None and rng.random() < 0.7:
            self.waiting.append(request)
            self.preempt()

    def _step_end(self, request: Request, start: int, stop: int, found: object = None) -> int:
        hit = found[0] if isinstance(found, tuple) else None
        end = self.pair.cache.step_end(request, start, stop, hit)
        assert start < end <= stop, f"a step from {start} to {stop} should end at {end}"
        assert end == stop or self.layout.has_states, f"a step ends at {end} for no state"
        return end if self.obeys or self.rng.random() < 0.5 else stop

    def end(self) -> None:
        self._end()

    def preempt(self) -> None:
        request = self._end()
        if request is not None:
            self.counts["preempted"] += 1
            request.num_preemptions += 1
            self.waiting.append(request)

    def _end(self) -> Request | None:
        if not self.pair.live:
            return None
        live = self.rng.choice(list(self.pair.live.values()))
        self._note(f"free {live.request.request_id}")
        if live.is_decoding:
            self.pair.leave([live])
        self.pair.free(live)
        return live.request

    def match(self) -> None:
        request = self._new_request()
        self.pair.match(request, self.rng.choice([None, self.rng.randint(0, request.num_tokens)]))

    # -- computing alone

    def compute(self) -> None:
        """The next thing that an engine would do with a request: commit its step, or make room for another."""
        if self._alone():
            live = self.rng.choice(self._alone())
            record = self.pair.record(live)
            if max(live.stop, record.outside) > record.computed:
                self._commit(live)
            else:
                self._next_chunk(live)

    def grow(self) -> None:
        """Make room for a step, whether or not one is in flight."""
        if self._alone() and not self.layout.has_states:
            self._next_chunk(self.rng.choice(self._alone()))

    def _commit(self, live: Live) -> None:
        record = self.pair.record(live)
        stop = min(live.stop, live.request.num_tokens)
        if self.rng.random() < 0.3 and record.outside > record.computed:
            stop = record.outside
        elif self.rng.random() < 0.2 and not self.layout.has_states:
            lowest = record.outside if self.layout.has_windows else record.computed
            stop = self.rng.randint(max(record.computed, min(lowest, stop)), stop)
        self._note(f"commit {live.request.request_id} {stop}")
        self.pair.commit(live, stop)

    def _next_chunk(self, live: Live) -> None:
        request, start = live.request, self._computed(live)
        if self.pair.record(live).outside > start:
            return
        if start == request.num_tokens:
            request.append(self.rng.randrange(3))
        left = min(request.num_tokens - start, self.layout.max_in_flight_tokens)
        stop = self._step_end(request, start, start + self.rng.choice([left, self.rng.randint(1, left)]))
        self._note(f"allocate {request.request_id} {start} .. {stop}")
        if not self.pair.grow(live, stop - start):
            self.counts["short"] += 1
            self.preempt()

    def draft(self) -> None:
        """One token and drafts after it, some of which are right."""
        fit = [live for live in self._alone() if self._computed(live) == live.request.num_tokens - 1]
        if not fit:
            return
        live, num_drafts = self.rng.choice(fit), self.rng.randint(1, 6)
        num_right = self.rng.randint(0, num_drafts)
        self._note(f"draft {live.request.request_id} {num_drafts}, {num_right} are right")
        if self.pair.grow(live, 1, num_drafts):
            self.counts["drafts"] += 1
            for _ in range(num_right):
                live.request.append(self.rng.randrange(3))
            self.pair.commit(live, live.request.num_tokens)
            live.request.append(self.rng.randrange(3))
            if self.rng.random() < 0.9:
                self.pair.trim(live)

    # -- decoding together

    def _can_decode(self, live: Live, num_left: int) -> bool:
        """Whether all tokens but the last `num_left` have room; a state must have been kept just there."""
        end, record = live.request.num_tokens - num_left, self.pair.record(live)
        if live.has_drafts or not record.outside <= end <= self.pair.num_slots(live):
            return False
        return not self.layout.has_states or end in (live.stop, record.computed)

    def step(self) -> None:
        fit = [live for live in self._alone() if self._can_decode(live, 0)]
        chosen = self.rng.sample(fit, self.rng.randint(0, len(fit)))
        self._note(f"step {[live.request.request_id for live in chosen]}")
        self.pair.step(chosen, self._tokens(len(chosen)), in_batch=False)
        self.counts["steps"] += len(chosen) > 0

    def join(self) -> None:
        fit = [live for live in self._alone() if self._can_decode(live, 1)]
        if fit:
            live = self.rng.choice(fit)
            self._note(f"join {live.request.request_id}")
            self.pair.join(live)

    def step_batch(self) -> None:
        decoding = self.pair.decoding
        self._note(f"step batch {[live.request.request_id for live in decoding]}")
        if self.pair.batch.unserved and not self.pair.serve():
            self.preempt()
            return
        self.pair.step(decoding, self._tokens(len(decoding)), in_batch=True)
        self.counts["batch steps"] += len(decoding) > 0

    def leave(self) -> None:
        decoding = self.pair.decoding
        leaving = self.rng.sample(decoding, self.rng.randint(0, len(decoding)))
        self._note(f"leave {[live.request.request_id for live in leaving]}")
        self.pair.leave(leaving)

    # -- the whole cache

    def invalidate(self) -> None:
        """Some blocks turn out bad: any, or those of a load that failed before it was committed."""
        bad = self._failed_load() if self.rng.random() < 0.5 else set()
        blocks = [block for block, content in enumerate(self.pair.oracle.content) if content is not None]
        if blocks and not bad:
            bad = set(self.rng.choices(blocks, k=self.rng.choice([1, 1, 3])))
        self._note(f"invalidate {bad}")
        self.pair.invalidate(bad)
        self.counts["invalidated"] += len(bad) > 0

    def _failed_load(self) -> set[int]:
        """A block that is to be filled from outside, and all after it, in one group."""
        records = [self.pair.record(live) for live in self._alone()]
        loads = [record for record in records if record.outside > record.computed]
        if not loads:
            return set()
        record, g = self.rng.choice(loads), self.rng.choice(self.pair.oracle.decoder)
        own = record.ids[g.group_id]
        first = self.rng.randint(record.computed // g.size, g.num_blocks(record.outside) - 1)
        return {block for block in own[first:] if block and self.pair.oracle.holders[block] == 1}

    def clear(self) -> None:
        if self.rng.random() < 0.3:
            while self.pair.live:
                self._end()
        self._note("clear")
        self.counts["cleared"] += not self.pair.live
        self.pair.clear()
