"""How long a step takes: a roofline estimate from what an accelerator and a model are.

    seconds = base + P * prefill_token + A * attended_pair + K * kv_token

P prompt tokens are computed, which costs arithmetic; A counts their (query, key) pairs; every step reads the weights
(base) and the K tokens of keys and values that its requests attend to, which costs memory bandwidth. docs/timing.md
derives each term. Parts are added, not overlapped: the estimate errs towards slow.
"""

from dataclasses import dataclass
from math import inf

from kvpool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Dense 16-bit arithmetic rate and memory bandwidth as the vendor's data sheet gives them."""

    name: str
    flops: float
    bandwidth: float
    """Bytes a second."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What sets a dense decoder's cost: its weights, and what attention keeps of a token."""

    name: str
    num_parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bytes_per_parameter: float = 2.0
    kv_bytes_per_element: float = 2.0

    @property
    def kv_bytes_per_token(self) -> int:
        """2 (keys and values) x layers x KV heads x head size x bytes; never the attention heads."""
        return int(2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes_per_element)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds a step, a prefilled token, a (query, key) pair of the prefill, and a token of KV read."""

    base_s: float
    prefill_token_s: float
    kv_token_s: float = 0.0
    attended_pair_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_s", "prefill_token_s", "kv_token_s", "attended_pair_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: a time is 0 or more seconds, and finite")
        if not self.base_s + self.prefill_token_s > 0:
            raise ConfigError("base_s and prefill_token_s are both 0: a step that takes no time never ends the run")

    def seconds(self, num_prefill_tokens: int, num_kv_tokens: int, num_attended_pairs: float = 0) -> float:
        return (
            self.base_s
            + num_prefill_tokens * self.prefill_token_s
            + num_kv_tokens * self.kv_token_s
            + num_attended_pairs * self.attended_pair_s
        )


ACCELERATORS = {
    a.name: a
    for a in (
        Accelerator("A100-80GB", 312e12, 2.039e12),
        Accelerator("H100-SXM", 989e12, 3.35e12),
        Accelerator("H200", 989e12, 4.8e12),
        Accelerator("B200", 2250e12, 8.0e12),
        Accelerator("MI300X", 1307e12, 5.3e12),
        Accelerator("L4", 121e12, 0.3e12),
        Accelerator("L40S", 362e12, 0.864e12),
        Accelerator("RTX-4090", 165e12, 1.008e12),
    )
}

MODELS = {
    m.name: m
    for m in (
        ModelShape("Llama-3.1-8B", 8.03e9, 32, 32, 8, 128),
        ModelShape("Llama-3.1-70B", 70.6e9, 80, 64, 8, 128),
        ModelShape("Llama-3.2-1B", 1.24e9, 16, 32, 8, 64),
        ModelShape("Qwen2.5-7B", 7.62e9, 28, 28, 4, 128),
        ModelShape("Qwen3-8B", 8.19e9, 36, 32, 8, 128),
        ModelShape("Qwen3-32B", 32.8e9, 64, 64, 8, 128),
        ModelShape("Mistral-7B", 7.25e9, 32, 32, 8, 128),
        ModelShape("SmolLM2-135M", 0.135e9, 30, 9, 3, 64),
    )
}


def roofline(
    accelerator: Accelerator,
    model: ModelShape,
    *,
    num_accelerators: int = 1,
    compute_efficiency: float = 0.7,
    bandwidth_efficiency: float = 0.8,
    overhead_s: float = 0.002,
) -> StepTime:
    """The step time of a model on accelerators that split it evenly.

    The efficiencies are the shares of the data-sheet rates that kernels reach; `overhead_s` is spent each step outside
    of kernels.
    """
    flops = accelerator.flops * compute_efficiency * num_accelerators
    bandwidth = accelerator.bandwidth * bandwidth_efficiency * num_accelerators
    return StepTime(
        base_s=overhead_s + model.num_parameters * model.weight_bytes_per_parameter / bandwidth,
        prefill_token_s=2 * model.num_parameters / flops,
        kv_token_s=model.kv_bytes_per_token / bandwidth,
        attended_pair_s=4 * model.num_layers * model.num_heads * model.head_dim / flops,
    )
