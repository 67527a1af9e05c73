"""From a loaded model to the memory of its cache: weights, peak, budget, plan.

budget = free memory x utilization - weights - peak of the largest batch; or a figure that is given. Free memory is what
was free before the weights were loaded: they may lie in files that are only cached, and count as free behind that.

Knows nothing of: how a batch is computed, terminals.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kvpool.errors import ConfigError
from kvpool.models.description import Description, describe
from kvpool.models.sizing import Host, Sizing, size_model
from kvpool.plan.budget import UTILIZATION, Budget
from kvpool.plan.deployment import Deployment
from kvpool.plan.grouping import group_layers
from kvpool.plan.layout import Layout
from kvpool.plan.memory import GIB, Plan
from kvpool.plan.spec import State
from kvpool.runner.loading import LoadedModel
from kvpool.runner.memory import Memory
from kvpool.runner.packing import packed_bytes
from kvpool.runner.refused import longest_alike
from kvpool.runner.state_shapes import States, measure_states, with_states

MeasurePeak = Callable[[Layout, int], int]
"""Runs a batch of so many tokens with nothing cached, and answers the bytes that it took at its peak."""

KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
UTILIZATIONS: Mapping[str, float] = {"cpu": 0.5, "cuda": UTILIZATION}
"""Where none is asked for: a machine's memory has other users, a device is the engine's."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What is asked of the cache. The names are those of vLLM's flags where it has them."""

    kv_dtype: str = "auto"
    block_size: int | None = None
    """16 where None; states may raise it."""
    max_model_len: int | None = None
    """None: what the model was made for; 0: the longest that fits."""
    max_num_batched_tokens: int = 2048
    kv_bytes: int | None = None
    """For the cache, instead of a share of what is free."""
    utilization: float | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"KV dtype {self.kv_dtype!r} is not computed here: {', '.join(KV_DTYPES)} are")
        if self.kv_bytes is not None and self.utilization is not None:
            raise ConfigError("memory for the cache and a share of the free memory are both given: one of them decides")


@dataclass(frozen=True, slots=True)
class Start:
    """A worker can begin: `KVCacheManager.from_plan(start.plan)` is its cache. Travels between processes."""

    sizing: Sizing
    states: States
    """The tensors of every layer that has a state."""

    @property
    def plan(self) -> Plan:
        return self.sizing.plan


def start(loaded: LoadedModel, memory: Memory, measure_peak: MeasurePeak, settings: CacheSettings) -> Start:
    """Measure and plan. `memory` is what there was before the model was loaded.

    ConfigError with the numbers when one request of `max_model_len` cannot fit, or what is asked for is not there.
    """
    description, states = _described(loaded, settings)
    _require_length(loaded, description, settings)
    layout = group_layers(description.model.caches(), settings.block_size or 16)
    budget = _budget(loaded, memory, partial(measure_peak, layout), settings)
    sizing = size_model(
        description,
        Host(kv_bytes=_kv_bytes(budget, settings), weights_bytes=budget.weights_bytes),
        deployment=Deployment(block_size=settings.block_size, max_num_batched_tokens=settings.max_num_batched_tokens),
        max_model_len=settings.max_model_len,
    )
    refusal = sizing.plan.refusal()
    if refusal is not None:
        raise ConfigError(f"{refusal}; {_way_out(sizing.plan)}")
    return Start(replace(sizing, budgets=(budget,) if settings.kv_bytes is None else ()), states)


def _described(loaded: LoadedModel, settings: CacheSettings) -> tuple[Description, States]:
    """What the configuration says, and states as they are measured."""
    config = {**loaded.config.to_dict(), "model_type": loaded.config.model_type}
    description = describe(config, name=loaded.name, kv_dtype=settings.kv_dtype, dtype=loaded.dtype)
    if not any(isinstance(spec, State) for layer in description.model.layers for spec in layer):
        return description, {}
    states = measure_states(loaded.model)
    return replace(description, model=with_states(description.model, states)), states


def _require_length(loaded: LoadedModel, description: Description, settings: CacheSettings) -> None:
    alike = longest_alike(loaded.config)
    if alike is not None and not 0 < (settings.max_model_len or description.model.max_model_len or 0) <= alike:
        raise ConfigError(
            f"{loaded.name} rotates positions in another way as soon as one request of a step has more than {alike:,} "
            f"tokens, so that requests would change each other: it is served up to that, with --max-model-len {alike}"
        )
    longest = None if loaded.max_model_len is None else description.model.max_model_len
    if longest is not None and (settings.max_model_len or 0) > longest:
        raise ConfigError(f"max_model_len is {settings.max_model_len:,}: {loaded.name} was made for {longest:,} tokens")


def _budget(loaded: LoadedModel, memory: Memory, measure_peak: Callable[[int], int], settings: CacheSettings) -> Budget:
    """Of a share of what was free; of all of it where the cache's part is given."""
    usual = UTILIZATIONS.get(loaded.model.device.type, UTILIZATION)
    share = usual if settings.utilization is None else settings.utilization
    # The first token brings the weights in, which are no part of the peak.
    measure_peak(1)
    return Budget(
        memory.free_bytes,
        share if settings.kv_bytes is None else 1.0,
        weights_bytes=weights_bytes(loaded),
        activation_bytes=measure_peak(settings.max_num_batched_tokens),
    )


def _kv_bytes(budget: Budget, settings: CacheSettings) -> int:
    if budget.left_bytes <= 0:
        parts = ", ".join(f"{_gib(number)} of {what}" for what, number in budget.needs if number)
        raise ConfigError(
            f"{_gib(budget.usable_bytes)} may be used, {budget.utilization:g} of what is free: {parts} leave nothing "
            "for the cache; a larger --gpu-memory-utilization or a smaller --max-num-batched-tokens may"
        )
    if settings.kv_bytes is None:
        return budget.kv_bytes
    if settings.kv_bytes > budget.left_bytes:
        raise ConfigError(
            f"{_gib(settings.kv_bytes)} are asked for the cache, and "
            f"{_gib(budget.left_bytes)} are free beside the model"
        )
    return settings.kv_bytes


def weights_bytes(loaded: LoadedModel) -> int:
    """Of parameters, buffers and what is packed; what is shared counts once."""
    kept = {tensor.data_ptr(): tensor for tensor in (*loaded.model.parameters(), *loaded.model.buffers())}
    loose: int = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    return loose + packed_bytes(loaded.model)


def _way_out(plan: Plan) -> str:
    needed = plan.kv_bytes_for(1, plan.max_model_len)[0]
    return f"--kv-gib {-(-needed * 100 // GIB) / 100:g} has room for one such request"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
