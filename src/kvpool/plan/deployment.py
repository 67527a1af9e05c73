"""How a model is served: over which ranks, in blocks of which size; and what that makes of its layers.

Tensor parallelism divides heads, pipeline stages divide layers, context parallelism divides the tokens of a request,
data parallelism multiplies all of it. Knows nothing of: memory, what a request takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpool.errors import ConfigError
from kvpool.plan.devices import ARCHITECTURES
from kvpool.plan.grouping import group_layers, layout_of_vllm
from kvpool.plan.kinds import ChunkedLocal, FullAttention, StateSpace
from kvpool.plan.layout import Group, Layout
from kvpool.plan.model import Model, Specs, named
from kvpool.plan.packing import is_compressed, packed_layout
from kvpool.plan.pages import LayerName, LayerPage
from kvpool.plan.rules import Rule
from kvpool.plan.spec import Attention, CachedSpec, Latent, LayerSpec, State, require_whole

BLOCK_SIZE = 16
CACHE_MODES = ("none", "align", "all")


@dataclass(frozen=True, slots=True)
class Deployment:
    """The names are those of vLLM's flags where it has them. ConfigError for what cannot be."""

    tp: int = 1
    """Ranks that divide every layer."""
    pp: int | tuple[int, ...] = 1
    """Pipeline stages, or how many layers each has."""
    dp: int = 1
    """Replicas; the others' memory is not this one's."""
    dcp: int = 1
    """Ranks, of those of `tp`, that divide a request's tokens among them."""
    block_size: int | None = None
    """In tokens, on one rank; None: 16, or what the rule has for such layers on such devices."""
    max_num_batched_tokens: int = 8192
    """The most tokens of a request in one step."""
    num_speculative_tokens: int = 0
    """Drafted a step: each needs a state of its own beside a request's."""
    mtp: bool = False
    """The model's own draft heads run beside it."""
    mamba_cache_mode: str | None = None
    """What states keep for prefix caching: "none", "align", "all"; None: as the rule has it."""
    architecture: str = "hopper"
    """Of the devices, one of `devices.ARCHITECTURES`."""

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "dcp", "max_num_batched_tokens"):
            require_whole(name, getattr(self, name), 1)
        require_whole("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.block_size is not None:
            require_whole("block_size", self.block_size, 1)
        for stage in (self.pp,) if isinstance(self.pp, int) else self.pp or (0,):
            require_whole("pp", stage, 1)
        if self.tp % self.dcp:
            raise ConfigError(f"dcp {self.dcp} does not divide tp {self.tp}: its ranks are some of those")
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"architecture {self.architecture!r} is not known: {', '.join(ARCHITECTURES)} are")
        if self.mamba_cache_mode not in (None, *CACHE_MODES):
            raise ConfigError(f"mamba_cache_mode {self.mamba_cache_mode!r} is not known: {', '.join(CACHE_MODES)} are")

    def stages_of(self, model: Model) -> tuple[int, ...]:
        """How many layers every pipeline stage has.

        Where only the number of stages is given: equally many, and what remains goes to the last but one, the one
        before it, and so on, as vLLM does since the last has the head. ConfigError when they do not add up.
        """
        num_layers = len(model.layers)
        if isinstance(self.pp, tuple):
            if sum(self.pp) != num_layers:
                raise ConfigError(
                    f"pp {','.join(map(str, self.pp))} is {sum(self.pp)} layers: the model has {num_layers}"
                )
            return self.pp
        if self.pp > num_layers:
            raise ConfigError(f"pp is {self.pp}: the model has {num_layers} layers, and a stage at least 1")
        each, rest = divmod(num_layers, self.pp)
        return tuple(each + (0 < self.pp - 1 - stage <= rest) for stage in range(self.pp))

    def caches(self, model: Model, draft: Model | None, rule: Rule) -> Specs:
        """What the layers keep on a rank, the draft's among them, as the rule takes them."""
        if self.mtp and not model.draft:
            raise ConfigError(f"{model.name} has no draft heads: leave out mtp")
        target = {name: self._adapted(spec, rule) for name, spec in model.caches(with_draft=self.mtp).items()}
        if not rule.shares_index:
            target = _all_with_index(target)
        if self.dcp > 1:
            _require_divisible_tokens(target, self.tp, self.dcp)
        beside = () if draft is None else draft.caches().items()
        return {
            **{name: self._replicated(spec) if _is_draft(name) else spec for name, spec in target.items()},
            **{f"draft.{name}": self._replicated(self._adapted(spec, rule)) for name, spec in beside},
        }

    def layout(self, caches: Specs, rule: Rule) -> Layout:
        """The groups over one pool; their block sizes in tokens of a request."""
        size = self.block_size or self._default_block_size(caches, rule)
        if rule.counts != "vllm":
            layout = group_layers(caches, size, self.tp)
        elif is_compressed(caches):
            if self.pp not in (1, (1,)) and rule.packing != "groups":
                raise ConfigError(f"how {rule.name} packs compressed latents over stages is not known: vllm-0.27.0 is")
            layout = packed_layout(caches, rule.packing)
        else:
            layout = layout_of_vllm(caches, size, self.tp, rule)
        return layout if self.dcp == 1 else _over_ranks(layout, self.dcp)

    def owners(self, model: Model, caches: Specs) -> list[list[LayerName]]:
        """The names of the caches of each stage; drafts run on the last."""
        layers = iter([[name for name, _ in named((layer,), first=index)] for index, layer in enumerate(model.layers)])
        stages = [[name for _ in range(count) for name in next(layers)] for count in self.stages_of(model)]
        stages[-1] += [name for name in caches if _is_draft(name)]
        return stages

    def _default_block_size(self, caches: Specs, rule: Rule) -> int:
        latents = [spec for spec in caches.values() if isinstance(spec, Latent)]
        if not latents or rule.latent_block_size is None:
            return BLOCK_SIZE
        if rule.index_block_size and any(spec.index is not None for spec in latents):
            return rule.index_block_size
        if any(isinstance(spec, Attention) for spec in caches.values()):
            return 2 * (rule.index_block_size or BLOCK_SIZE)
        return rule.latent_block_size.get(self.architecture, BLOCK_SIZE)

    def _adapted(self, spec: LayerSpec, rule: Rule) -> LayerSpec:
        """With room for drafted states; chunks as full attention where the rule has them so."""
        if isinstance(spec, State) and self.num_speculative_tokens:
            return replace(spec, kind=StateSpace(num_scratch_blocks=self.num_speculative_tokens))
        if rule.chunked_is_full and isinstance(spec, Attention) and isinstance(spec.kind, ChunkedLocal):
            return replace(spec, kind=FullAttention())
        return spec

    def _replicated(self, spec: LayerSpec) -> LayerSpec:
        """A draft is whole on every rank: where the target keeps one token, it keeps those of all `dcp` ranks."""
        match spec:
            case Attention() if self.dcp > 1:
                width, width_v = spec.head_dim, spec.head_dim if spec.head_dim_v is None else spec.head_dim_v
                return replace(
                    spec,
                    head_dim=width * self.dcp,
                    head_dim_v=width_v * self.dcp,
                    scale_bytes=spec.scale_bytes * self.dcp,
                )
            case _ if self.dcp > 1:
                raise ConfigError(
                    f"dcp {self.dcp} with a draft that keeps latents or states is not known: leave one out"
                )
        return spec


def _is_draft(name: LayerName) -> bool:
    return str(name).startswith("draft.")


def _all_with_index(caches: Specs) -> dict[LayerName, LayerSpec]:
    """Every latent with an index cache where one has."""
    index = next((spec.index for spec in caches.values() if isinstance(spec, Latent) and spec.index), None)
    return {
        name: replace(spec, index=index) if isinstance(spec, Latent) and index is not None else spec
        for name, spec in caches.items()
    }


def _require_divisible_tokens(caches: Specs, tp: int, dcp: int) -> None:
    """Only what several ranks would have otherwise can be divided among them by its tokens."""
    for name, spec in caches.items():
        if isinstance(spec, Attention) and not _is_draft(name) and spec.num_kv_heads * dcp > tp:
            raise ConfigError(
                f"dcp {dcp} divides tokens among ranks that have the same heads: {spec.num_kv_heads} KV heads on "
                f"{tp} ranks leave {max(tp // spec.num_kv_heads, 1)}"
            )
        if isinstance(spec, CachedSpec) and not isinstance(spec.kind, FullAttention):
            raise ConfigError(
                f"dcp divides the tokens of full attention alone, and layer {name!r} is {type(spec.kind).__name__}: "
                "dcp 1 works"
            )


def _over_ranks(layout: Layout, dcp: int) -> Layout:
    """A block stands for as many tokens more as ranks share them."""

    def wide(page: LayerPage) -> LayerPage:
        return replace(page, kind=replace(page.kind, block_size=(page.kind.block_size or 1) * dcp))

    groups = (replace(group, pages=tuple(map(wide, group.pages))) for group in layout.groups)
    return replace(
        layout, groups=tuple(Group(group.pages[0].kind, group.pages, group.num_padding_layers) for group in groups)
    )


def by_stage(kv_bytes: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Memory of each stage. ConfigError when there are more or fewer figures than stages."""
    given = (kv_bytes,) * num_stages if isinstance(kv_bytes, int) else tuple(kv_bytes)
    if len(given) != num_stages:
        raise ConfigError(f"memory is given for {len(given)} stages: there are {num_stages}")
    for number in given:
        require_whole("kv_bytes", number, 0)
    return given
