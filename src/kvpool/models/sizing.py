"""A model on devices: what is left for its cache, and what fits into that.

Knows nothing of: files, terminals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.description import Description
from kvpool.models.weight_bytes import Ranks, weight_bytes
from kvpool.plan.budget import UTILIZATION, Budget
from kvpool.plan.deployment import Deployment
from kvpool.plan.devices import Device
from kvpool.plan.memory import Plan, plan_memory
from kvpool.plan.overhead import DEVICE_KINDS, EngineSettings, overhead
from kvpool.plan.rules import BLOCKS, Rule

_MEASURED = ("hopper", "blackwell", "cdna")


@dataclass(frozen=True, slots=True)
class Host:
    """The devices of the ranks, all alike, and what is given instead of estimated."""

    device: Device | None = None
    utilization: float = UTILIZATION
    kv_bytes: int | tuple[int, ...] | None = None
    """For the cache, of every rank or of a rank of each stage: nothing is estimated then."""
    weights_bytes: int | None = None
    """Of every rank, instead of a count."""
    other_bytes: int | None = None
    """All that is neither weights nor cache, instead of estimates."""
    max_num_seqs: int = 1024
    eager: bool = False
    expert_parallel: bool = False


@dataclass(frozen=True)
class Sizing:
    """The answer: a plan, and the budget of each stage where it was estimated."""

    description: Description
    host: Host
    plan: Plan
    budgets: tuple[Budget, ...]
    draft: Description | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures stand on and no file says."""
        of_draft = () if self.draft is None else (f"of the draft: {note}" for note in self.draft.model.assumed)
        return tuple(
            dict.fromkeys((*self.plan.model.assumed, *self._notes_on_weights(), *of_draft, *self._on_device()))
        )

    def _on_device(self) -> tuple[str, ...]:
        device = self.host.device
        if not self.budgets or self.host.other_bytes is not None or device is None or device.architecture in _MEASURED:
            return ()
        return (f"overhead on {device.name} as on devices that starts are known of: {', '.join(_MEASURED)}",)

    def _notes_on_weights(self) -> tuple[str, ...]:
        if self.description.weights is None:
            return (f"the weights are not counted: {self.description.why_no_weights}",)
        return self.description.weights.assumed

    def to_dict(self) -> dict[str, Any]:
        """For JSON: counts are numbers, bytes are of one rank of the stage that decides, None is what has no limit."""
        plan = self.plan
        length = plan.max_model_len
        concurrency = plan.max_concurrency()
        slope = plan.bytes_per_token
        weights = self.description.weights
        return {
            "model": plan.model.name,
            "device": None if self.host.device is None else self.host.device.name,
            "rule": plan.rule.name,
            "max_model_len": length,
            "fits": plan.fits,
            "refusal": plan.refusal(),
            "num_blocks": plan.num_blocks,
            "num_usable_blocks": plan.num_usable_blocks,
            "block_bytes": plan.block_bytes,
            "bytes_per_token": int(slope) if slope.denominator == 1 else float(slope),
            "constant_bytes": 0 if plan.keeps_nothing else plan.constant_bytes(length),
            "kv_tokens": plan.kv_tokens,
            "max_concurrency": None if isinf(concurrency) else concurrency,
            "num_requests": plan.num_requests(),
            "longest_request": plan.longest,
            "blocks_per_request": 0 if plan.keeps_nothing else plan.blocks_per_request(length),
            "steady_blocks_per_request": plan.steady_blocks(length),
            "least_bytes_per_request": plan.least_bytes(length),
            "smallest_hit": plan.smallest_hit,
            "groups": [
                {
                    "kind": type(group.kind).__name__,
                    "block_size": group.kind.block_size,
                    "num_layers": len(group.pages),
                    "num_padding_layers": group.num_padding_layers,
                }
                for group in plan.layout.groups
            ],
            "waste": {
                "num_padding_layers": plan.layout.waste.num_padding_layers,
                "padding_layers_share": float(plan.layout.waste.padding_layers_share),
                "page_share": float(plan.layout.waste.page_share),
                "share": float(plan.layout.waste.share),
            },
            "kv_bytes": [stage.kv_bytes for stage in plan.stages],
            "budget": [
                {"total_bytes": b.total_bytes, "utilization": b.utilization, "usable_bytes": b.usable_bytes}
                | {what.replace(" ", "_"): num_bytes for what, num_bytes in b.needs}
                for b in self.budgets
            ],
            "num_parameters": None if weights is None else weights.parameters.total,
            "num_active_parameters": None if weights is None else weights.parameters.active,
            "tp": plan.deployment.tp,
            "pp": len(plan.stages),
            "dp": plan.deployment.dp,
            "dcp": plan.deployment.dcp,
            "log_lines": list(plan.log_lines()),
            "notes": list(self.notes),
        }


def size_model(
    description: Description,
    host: Host,
    *,
    deployment: Deployment | None = None,
    rule: Rule = BLOCKS,
    max_model_len: int | None = None,
    draft: Description | None = None,
) -> Sizing:
    """What fits. `max_model_len` None: what the model was made for; 0: the longest that fits, up to that.

    ConfigError when neither device nor memory is given, and for whatever cannot be.
    """
    deployment = deployment or Deployment()
    if host.device is not None and host.device.architecture is not None:
        deployment = replace(deployment, architecture=host.device.architecture)
    model, stages = description.model, deployment.stages_of(description.model)
    budgets: tuple[Budget, ...] = ()
    memory = host.kv_bytes
    if memory is None:
        budgets = _budgets(description, host, deployment, rule, stages, draft)
        memory = tuple(budget.kv_bytes for budget in budgets)
    beside = None if draft is None else draft.model
    plan = plan_memory(
        model,
        memory,
        max_model_len=max_model_len or model.max_model_len,
        deployment=deployment,
        rule=rule,
        draft=beside,
    )
    if max_model_len == 0:
        plan = _at_longest(plan)
    return Sizing(description, host, plan, budgets, draft)


def _at_longest(plan: Plan) -> Plan:
    if plan.longest == 0:
        return plan
    return replace(plan, max_model_len=min(filter(None, (plan.longest, plan.max_model_len))))


def _budgets(
    description: Description,
    host: Host,
    deployment: Deployment,
    rule: Rule,
    stages: Sequence[int],
    draft: Description | None,
) -> tuple[Budget, ...]:
    if host.device is None:
        raise ConfigError("neither a device nor the memory for the cache is given: --device H100, or --kv-gib 40")
    weights = _weights(description, host, deployment, stages, draft)
    return tuple(
        Budget(
            host.device.total_bytes, host.utilization, of_stage, *_other(description, host, deployment, rule, layers)
        )
        for of_stage, layers in zip(weights, stages, strict=True)
    )


def _weights(
    description: Description, host: Host, deployment: Deployment, stages: Sequence[int], draft: Description | None
) -> list[int]:
    if host.weights_bytes is not None:
        return [host.weights_bytes] * len(stages)
    ranks = Ranks(deployment.tp, deployment.dp, host.expert_parallel, tuple(stages))
    counted = description.counted()
    bytes_ = list(weight_bytes(counted.parameters, counted.scheme, ranks, with_draft=deployment.mtp))
    if draft is not None:
        beside = draft.counted()
        bytes_[-1] += sum(weight_bytes(beside.parameters, beside.scheme, replace(ranks, stages=())))
    return bytes_


def _other(
    description: Description, host: Host, deployment: Deployment, rule: Rule, num_layers: int
) -> tuple[int, int, int]:
    """Activations, what is outside, graphs, of a stage of so many layers."""
    if host.other_bytes is not None:
        return 0, host.other_bytes, 0
    assert host.device is not None
    settings = EngineSettings(
        tp=deployment.tp,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        max_num_seqs=host.max_num_seqs,
        device_kind=host.device.maker if host.device.maker in DEVICE_KINDS else DEVICE_KINDS[0],
        version=rule.name.removeprefix("vllm-") if rule.counts == "vllm" else "0.20.0",
        expert_parallel=host.expert_parallel,
        eager=host.eager,
    )
    found = overhead(replace(description.shape(), num_layers=num_layers), settings)
    return found.activation_bytes, found.outside_bytes, found.graph_bytes if found.counts_graphs else 0
