"""For integrators and for us: ways to drive a cache and to prove it right.

`NaiveCache` says what a cache should do, `check_same` compares whole states, `MirroredCache` does so after every call.
`serve` runs a whole prompt. `golden_adapter` gives the face of a serving history whose figures vLLM's own manager gave.
"""

from kvpool.testing.golden import GoldenAdapter, golden_adapter
from kvpool.testing.mirror import MirroredCache, apply_events, check_same
from kvpool.testing.naive import NaiveCache
from kvpool.testing.prompts import serve

__all__ = ["GoldenAdapter", "MirroredCache", "NaiveCache", "apply_events", "check_same", "golden_adapter", "serve"]
