"""The bytes of weights on each rank.

Tensor parallelism divides every weight by its units, and a rank has one at least. Experts are divided over the ranks of
all data parallel replicas, whole ones with expert parallelism and each cut in pieces without. A pipeline stage has its
layers; the first the embeddings too, and the last the head, which is the embeddings once more where it is tied to them.

Knows nothing of: configuration files, what else is in memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from kvpool.errors import ConfigError
from kvpool.models.formats import WeightScheme
from kvpool.models.weights import Parameters, Part, Weight
from kvpool.plan.spec import require_whole


@dataclass(frozen=True, slots=True)
class Ranks:
    """Over what the weights are divided. `stages`: how many layers each pipeline stage has; (): one stage has all."""

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_whole("tp", self.tp, 1)
        require_whole("dp", self.dp, 1)
        for stage in self.stages:
            require_whole("stages", stage, 0)


def weight_bytes(
    parameters: Parameters, scheme: WeightScheme, ranks: Ranks = Ranks(), *, with_draft: bool = False
) -> tuple[int, ...]:
    """Bytes of weights on the fullest rank of each pipeline stage. Draft layers are in the last.

    ConfigError when the stages' layers are not those of the model.
    """
    stages = ranks.stages or (len(parameters.layers),)
    if sum(stages) != len(parameters.layers):
        raise ConfigError(f"stages have {sum(stages)} layers together, the model has {len(parameters.layers)}")
    count = _Count(scheme, ranks)
    in_layers = [count.layer(layer, f"model.layers.{index}") for index, layer in enumerate(parameters.layers)]
    ends = list(accumulate(stages))
    in_stages = [sum(in_layers[end - stage : end]) for end, stage in zip(ends, stages, strict=True)]
    in_stages[0] += count.beside(parameters.first)
    in_stages[-1] += count.beside(_last(parameters, len(stages)))
    if with_draft:
        in_stages[-1] += sum(count.layer(layer, f"mtp.layers.{index}") for index, layer in enumerate(parameters.draft))
    return tuple(in_stages)


def _last(parameters: Parameters, num_stages: int) -> Iterator[Weight]:
    """A tied head is one more table of embeddings where the first stage is not the last."""
    yield from parameters.last
    if parameters.is_tied and num_stages > 1:
        yield next(weight for weight in parameters.first if weight.part == Part.EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class _Count:
    scheme: WeightScheme
    ranks: Ranks

    def layer(self, weights: Iterable[Weight], name: str) -> int:
        return sum(self._on_rank(weight, f"{name}.{weight.name}") for weight in weights)

    def beside(self, weights: Iterable[Weight]) -> int:
        return sum(self._on_rank(weight, weight.name) for weight in weights)

    def _on_rank(self, weight: Weight, path: str) -> int:
        whole, ranks = self._whole(weight, path), self.ranks
        if weight.part != Part.EXPERTS:
            return weight.num_copies * _share(whole, weight.num_units, ranks.tp)
        if ranks.expert_parallel:
            return -(-weight.num_copies // (ranks.tp * ranks.dp)) * whole
        return weight.num_copies * _share(whole, weight.num_units, ranks.tp * ranks.dp)

    def _whole(self, weight: Weight, path: str) -> int:
        """One copy, not divided."""
        absorbed = weight.num_elements * self.scheme.element_bytes if weight.is_absorbed else 0
        return self.scheme.num_bytes(weight, path) + absorbed


def _share(num_bytes: int, num_units: int, num_ranks: int) -> int:
    """What the fullest of some ranks has of a weight of so many units."""
    return -(-num_bytes * -(-num_units // num_ranks) // num_units)
