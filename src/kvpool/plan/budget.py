"""What a device has left for the cache: its memory, the share that the engine may use, and what else needs it.

Knows nothing of: blocks, requests, where the figures come from.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from kvpool.errors import ConfigError
from kvpool.plan.spec import require_whole

UTILIZATION = 0.92
"""vLLM's default since 0.30; 0.9 before."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one rank, in bytes. `kv_bytes` is what is left; 0 when the rest does not fit."""

    total_bytes: int
    utilization: float = UTILIZATION
    weights_bytes: int = 0
    activation_bytes: int = 0
    """The peak of a step of `max_num_batched_tokens` tokens."""
    outside_bytes: int = 0
    """Of the driver's context, of collectives: what the framework does not allocate."""
    graph_bytes: int = 0
    """Of captured graphs."""

    def __post_init__(self) -> None:
        for name in ("total_bytes", "weights_bytes", "activation_bytes", "outside_bytes", "graph_bytes"):
            require_whole(name, getattr(self, name), 0)
        if isinstance(self.utilization, bool) or not 0 < self.utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {self.utilization}: more than 0 and at most 1, such as 0.92")

    @property
    def usable_bytes(self) -> int:
        """The engine's share, rounded up as vLLM does."""
        return min(ceil(self.total_bytes * Fraction(str(self.utilization))), self.total_bytes)

    @property
    def left_bytes(self) -> int:
        """What remains; negative when the rest alone does not fit."""
        return self.usable_bytes - sum(bytes_ for _, bytes_ in self.needs)

    @property
    def kv_bytes(self) -> int:
        """For the cache."""
        return max(self.left_bytes, 0)

    @property
    def needs(self) -> tuple[tuple[str, int], ...]:
        """What else needs memory, in words."""
        return (
            ("weights", self.weights_bytes),
            ("peak activations", self.activation_bytes),
            ("outside the framework", self.outside_bytes),
            ("graphs", self.graph_bytes),
        )
