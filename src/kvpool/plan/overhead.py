"""Memory of one rank that is neither weights nor cache: activations, what is outside the framework, captured graphs.

An engine like vLLM runs one step of `max_num_batched_tokens` tokens before it sizes the cache, samples for
`max_num_seqs` requests, and sets the peak aside. The peak is the larger of two stages, in bytes:

    forward  = tokens x element_bytes x (4.25 x hidden + MLP)
    sampling = requests x vocabulary x bytes a logit + tokens x element_bytes x 1.25 x hidden + expert workspace

    MLP of a dense model = 3 x intermediate / tp: gate, up and their product
    MLP of experts = experts a token x (max(intermediate / tp, hidden) + max(2 x intermediate / tp, hidden)), the two
        buffers of the fused kernel; releases that keep them have them beside the logits

The constants of these lines are measured on H100, where debug logs split the peak: vLLM 0.11 (Llama-3.1-8B 4.76 GiB,
Qwen3-0.6B 5.56, Qwen3-32B 5.64, gpt-oss-20b 7.38) and 0.19 (Llama-3.1-8B 1.89, Qwen3-8B 2.21, Gemma 2 2B 3.62), from
llm-d-planner, docs/empirical-vllm-memory-results.md and accuracy/results/v0.19.0. Attention never is the peak, so it is
not here; nor are encoders of images (0.4 GiB for Qwen3-VL). In a pipeline the rank is one of the last stage, which
samples. What no formula gives is learnt from start-ups: `learn`.

Knows nothing of: weights, the cache, devices' sizes, utilisation, configuration files.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from kvpool.errors import ConfigError
from kvpool.plan.kinds import cdiv
from kvpool.plan.spec import require_whole

_MIB = 2**20
_FORWARD_HIDDEN_COPIES = 4.25
_SAMPLING_HIDDEN_COPIES = 1.25


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The widths of the whole model that activations depend on."""

    hidden_size: int
    intermediate_size: int
    """Of the dense MLP, or of one expert."""
    vocab_size: int
    num_layers: int
    num_experts_per_tok: int = 0
    """Routed experts that a token visits; 0: a dense model."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "vocab_size", "num_layers"):
            require_whole(name, getattr(self, name), 1)
        require_whole("num_experts_per_tok", self.num_experts_per_tok, 0)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine is started. The defaults are those of a vLLM server on a device of 70 GiB or more."""

    tp: int = 1
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    element_bytes: float = 2
    """Of an activation, whatever the weights are kept in."""
    device_kind: str = "nvidia"
    """One of `DEVICE_KINDS`."""
    version: str = "0.20.0"
    """Of vLLM, with or without a leading v. Earlier or later than any learnt from: the nearest is taken."""
    expert_parallel: bool = False
    """Ranks divide the experts, and not each expert."""
    eager: bool = False
    """No graphs are captured."""

    def __post_init__(self) -> None:
        for name in ("tp", "max_num_batched_tokens", "max_num_seqs"):
            require_whole(name, getattr(self, name), 1)
        if not 0 < self.element_bytes <= 8:
            raise ConfigError(f"element_bytes is {self.element_bytes!r}: more than 0 and at most 8, such as 2 for bf16")
        if self.device_kind not in DEVICE_KINDS:
            raise ConfigError(
                f"device_kind is {self.device_kind!r}: start-ups are known of {' and '.join(DEVICE_KINDS)}"
            )
        _ = self.release  # refused here rather than at its first use

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version: (0, 18) for "v0.18.0+cu128"."""
        match = re.match(r"v?(\d+)\.(\d+)", self.version)
        if not match:
            raise ConfigError(f"version is {self.version!r}: two numbers with a point, such as '0.18' or 'v0.18.0'")
        return int(match[1]), int(match[2])


@dataclass(frozen=True, slots=True)
class Overhead:
    """The three parts, in bytes of one rank; none is ever negative."""

    activation_bytes: int
    outside_bytes: int
    """Of the driver's context, of collectives, and whatever else is not the framework's."""
    graph_bytes: int
    """What captured graphs take beyond memory that the peak left free."""
    counts_graphs: bool
    """The engine sets `graph_bytes` aside before it sizes the cache. Older releases take them from what is left."""

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + self.outside_bytes + self.graph_bytes

    @property
    def counted_bytes(self) -> int:
        """What the engine takes off before it reports the memory available for the cache."""
        return self.total_bytes if self.counts_graphs else self.activation_bytes + self.outside_bytes


@dataclass(frozen=True, slots=True)
class Release:
    """What changed in vLLM, from that release on."""

    since: tuple[int, int]
    bytes_a_logit: float
    """38.25: the sampler sorts, so there are a sorted copy and a 64-bit order. 14.7: it does not (vllm pull 33538).

    Older builds whose sampler is FlashInfer's (the published 0.11.0, until vllm pull 26859) or AITER's have 14.7 too.
    """
    keeps_workspace: bool
    """The buffers of the fused experts outlive the forward stage, which hid them before."""
    counts_graphs: bool
    """An estimate of the graphs is taken off first (`VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`)."""


RELEASES = (
    Release((0, 0), 38.25, keeps_workspace=False, counts_graphs=False),
    Release((0, 14), 38.25, keeps_workspace=True, counts_graphs=False),
    Release((0, 17), 14.7, keeps_workspace=True, counts_graphs=False),
    Release((0, 20), 14.7, keeps_workspace=True, counts_graphs=True),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One learnt number, for all start-ups on such devices, from that release and that many ranks on."""

    device_kind: str
    since: tuple[int, int]
    least_tp: int
    num_bytes: int = 0

    def holds(self, settings: EngineSettings) -> bool:
        return (
            self.device_kind == settings.device_kind and self.since <= settings.release and self.least_tp <= settings.tp
        )


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What `learn` finds. Of the cells that hold, the last one counts."""

    outside: tuple[Cell, ...]
    graph_a_layer: tuple[Cell, ...]


LEARNT = Coefficients(
    outside=(
        Cell("nvidia", (0, 0), 1, 313 * _MIB),
        Cell("nvidia", (0, 0), 2, 759 * _MIB),
        Cell("nvidia", (0, 17), 1, 260 * _MIB),
        Cell("nvidia", (0, 17), 2, 2244 * _MIB),
        Cell("amd", (0, 0), 1, 1685 * _MIB),
        Cell("amd", (0, 0), 5, 3458 * _MIB),
    ),
    graph_a_layer=(
        Cell("nvidia", (0, 0), 1, 5 * _MIB),
        Cell("nvidia", (0, 17), 1, 27 * _MIB),
        Cell("amd", (0, 0), 1, 67 * _MIB),
        Cell("amd", (0, 17), 1, 110 * _MIB),
    ),
)
"""Of 203 start-ups of vLLM 0.11 to 0.20 on H200, B200 and MI300X, from vllm-memory-estimator, validation_db.json."""

DEVICE_KINDS = tuple(dict.fromkeys(cell.device_kind for cell in LEARNT.outside))
"""The makers of devices that start-ups are known of."""


@dataclass(frozen=True, slots=True)
class Boot:
    """One observed start-up."""

    model: str
    """One name for all quantisations of a model: each name has one vote."""
    shape: ModelShape
    settings: EngineSettings
    overhead_bytes: int
    """Utilisation x device memory - weights - memory available for the cache."""
    graph_bytes: int
    """As reported; negative where graphs took less than the peak had left free."""


def overhead(shape: ModelShape, settings: EngineSettings, coefficients: Coefficients = LEARNT) -> Overhead:
    """The overhead of one rank. More batched tokens never give less, and always more activations."""
    graph = 0 if settings.eager else _last(coefficients.graph_a_layer, settings) * shape.num_layers
    return Overhead(
        activation_bytes=activation_bytes(shape, settings),
        outside_bytes=_last(coefficients.outside, settings),
        graph_bytes=graph,
        counts_graphs=_release(settings).counts_graphs,
    )


def activation_bytes(shape: ModelShape, settings: EngineSettings) -> int:
    """The peak of the profiling step on one rank: see above for the two stages."""
    return round(max(_forward_bytes(shape, settings), _sampling_bytes(shape, settings)))


def learn(boots: Sequence[Boot]) -> Coefficients:
    """The cells of `LEARNT` from other start-ups: the median over models of the median over a model's boots.

    A cell without a boot takes all boots on its kind of device, or all there are. ConfigError for none at all.
    """
    if not boots:
        raise ConfigError("no start-ups to learn from: give 1 or more, or use LEARNT")
    graphs = _fill(LEARNT.graph_a_layer, boots, lambda boot: boot.graph_bytes / boot.shape.num_layers)
    known = Coefficients(_emptied(LEARNT.outside), graphs)
    outside = _fill(
        LEARNT.outside,
        boots,
        lambda boot: boot.overhead_bytes - overhead(boot.shape, boot.settings, known).counted_bytes,
    )
    return Coefficients(outside, graphs)


def _forward_bytes(shape: ModelShape, settings: EngineSettings) -> float:
    rows = settings.max_num_batched_tokens * settings.element_bytes
    mlp = 0.0 if shape.num_experts_per_tok else 3 * _intermediate_of_rank(shape, settings)
    return rows * (_FORWARD_HIDDEN_COPIES * shape.hidden_size + mlp) + _workspace_bytes(shape, settings)


def _sampling_bytes(shape: ModelShape, settings: EngineSettings) -> float:
    release = _release(settings)
    num_requests = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    logits = num_requests * shape.vocab_size * release.bytes_a_logit
    rows = settings.max_num_batched_tokens * settings.element_bytes
    workspace = _workspace_bytes(shape, settings) if release.keeps_workspace else 0.0
    return logits + rows * _SAMPLING_HIDDEN_COPIES * shape.hidden_size + workspace


def _workspace_bytes(shape: ModelShape, settings: EngineSettings) -> float:
    """Of the fused experts; none in a dense model."""
    width, hidden = _intermediate_of_rank(shape, settings), shape.hidden_size
    rows = settings.max_num_batched_tokens * shape.num_experts_per_tok * settings.element_bytes
    return rows * (max(width, hidden) + max(2 * width, hidden))


def _intermediate_of_rank(shape: ModelShape, settings: EngineSettings) -> int:
    whole = settings.expert_parallel and shape.num_experts_per_tok
    return shape.intermediate_size if whole else cdiv(shape.intermediate_size, settings.tp)


def _release(settings: EngineSettings) -> Release:
    return [release for release in RELEASES if release.since <= settings.release][-1]


def _last(cells: Sequence[Cell], settings: EngineSettings) -> int:
    return [cell for cell in cells if cell.holds(settings)][-1].num_bytes


def _emptied(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    return tuple(Cell(cell.device_kind, cell.since, cell.least_tp) for cell in cells)


def _fill(cells: Sequence[Cell], boots: Sequence[Boot], residual: Callable[[Boot], float]) -> tuple[Cell, ...]:
    marked = [Cell(cell.device_kind, cell.since, cell.least_tp, index) for index, cell in enumerate(cells)]
    filled = []
    for index, cell in enumerate(marked):
        own = [boot for boot in boots if _last(marked, boot.settings) == index]
        kin = [boot for boot in boots if boot.settings.device_kind == cell.device_kind]
        filled.append(
            Cell(cell.device_kind, cell.since, cell.least_tp, _median_of_models(own or kin or boots, residual))
        )
    return tuple(filled)


def _median_of_models(boots: Iterable[Boot], residual: Callable[[Boot], float]) -> int:
    """Never below 0: what is set aside is not given back."""
    by_model = defaultdict(list)
    for boot in boots:
        by_model[boot.model].append(residual(boot))
    return max(0, round(median(median(values) for values in by_model.values())))
