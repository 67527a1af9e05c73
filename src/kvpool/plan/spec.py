"""What one layer keeps: of which tokens (its kind), and in how many bytes.

A page is what one block takes in one layer on one rank. Whatever a configuration file calls its fields, a layer ends as
one of five: `Attention`, `Latent` and `State` keep something of their own; `SharedKV` and `EncoderOnly` do not.

Knows nothing of: other layers, groups, how much memory there is, configuration files.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from kvpool.errors import ConfigError
from kvpool.plan.kinds import ChunkedLocal, CrossAttention, FullAttention, LayerKind, SlidingWindow, StateSpace, cdiv

TokenKind: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | CrossAttention
"""The kinds that keep something of each token."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values per head: MHA, GQA, MQA.

    Bytes of a token on a rank = KV heads of the rank x (`head_dim` + `head_dim_v`) x `element_bytes`. Tensor
    parallelism divides the KV heads, and replicates them once there are more ranks than heads. They are never the
    attention heads. Half a byte an element is fine (fp4); a head's bytes are rounded up to whole ones.
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    """None: the values are as wide as the keys."""
    element_bytes: float = 2
    scale_bytes: int = 0
    """Beside the keys of a head and token, and beside its values: 4 for one fp32 scale, `head_dim` / 16 for NVFP4."""
    k_equals_v: bool = False
    """One tensor serves as keys and as values, so one is kept."""
    kind: TokenKind = FullAttention()  # noqa: RUF009

    can_pad: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim"):
            require_whole(name, getattr(self, name), 1)
        require_whole("head_dim_v", self._head_dim_v, 1)
        require_whole("scale_bytes", self.scale_bytes, 0)
        _require_kind(self.kind, TokenKind)
        _bytes_of(1, self.element_bytes)
        if self.k_equals_v and self._head_dim_v != self.head_dim:
            raise ConfigError(
                f"k_equals_v with head_dim {self.head_dim} and head_dim_v {self.head_dim_v}: leave it out"
            )

    def token_bytes(self, tp: int = 1) -> int:
        """What a token takes on one of `tp` ranks."""
        widths = (self.head_dim,) if self.k_equals_v else (self.head_dim, self._head_dim_v)
        head_bytes = _bytes_of(sum(widths), self.element_bytes) + self.scale_bytes * len(widths)
        return heads_per_rank(self.num_kv_heads, tp, "KV heads") * head_bytes

    def content_bytes(self, num_tokens: int, tp: int = 1) -> int:
        """What so many tokens take, block or no block."""
        return num_tokens * self.token_bytes(tp)

    def page_bytes(self, block_size: int, tp: int = 1) -> int:
        """What a block of `block_size` tokens takes on one of `tp` ranks."""
        return require_whole("block_size", block_size, 1) * self.token_bytes(tp)

    @property
    def _head_dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v


@dataclass(frozen=True, slots=True)
class IndexCache:
    """What a sparse layer keeps beside its latent to choose the tokens to look at: one key for all heads.

    Bytes of a token = `dim` x `element_bytes` + `scale_bytes`; DeepSeek V3.2: 128 in fp8 and an fp32 scale, 132 B.
    """

    dim: int
    element_bytes: float = 1
    scale_bytes: int = 4

    def __post_init__(self) -> None:
        require_whole("dim", self.dim, 1)
        require_whole("scale_bytes", self.scale_bytes, 0)
        _bytes_of(1, self.element_bytes)

    @property
    def token_bytes(self) -> int:
        return _bytes_of(self.dim, self.element_bytes) + self.scale_bytes


@dataclass(frozen=True, slots=True)
class Latent:
    """One compressed latent for all heads, and the rotated part of the key beside it (MLA).

    Bytes of a token on *every* rank = (`kv_lora_rank` + `rope_dim`) x `element_bytes` + what the index takes: keys and
    values come out of the same latent, so there is no factor of 2, and there is no head that tensor parallelism could
    divide. DeepSeek R1 in bf16: (512 + 64) x 2 = 1,152 B.
    """

    kv_lora_rank: int
    rope_dim: int
    element_bytes: float = 2
    rope_element_bytes: float | None = None
    """None: as the latent. An fp8 latent may keep its rotated part in bf16."""
    scale_bytes: int = 0
    """For the whole token."""
    index: IndexCache | None = None
    compression: int = 1
    """So many tokens share one latent (DeepSeek V4: 4 or 128), and a block holds a whole number of them."""
    page_multiple: int = 1
    """Pages are whole multiples of so many bytes, and may be padded; 1: kernels read them page after page."""
    kind: TokenKind = FullAttention()  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "compression", "page_multiple"):
            require_whole(name, getattr(self, name), 1)
        require_whole("rope_dim", self.rope_dim, 0)
        require_whole("scale_bytes", self.scale_bytes, 0)
        _require_kind(self.kind, TokenKind)
        _bytes_of(1, self.element_bytes)
        _bytes_of(1, self._rope_element_bytes)

    @property
    def can_pad(self) -> bool:
        """Whether a page may be larger than what it keeps."""
        return self.page_multiple > 1

    def token_bytes(self, tp: int = 1) -> int:
        """What a token takes on one of `tp` ranks, or as many as share a latent: the same however many ranks."""
        require_whole("tp", tp, 1)
        latent = _bytes_of(self.kv_lora_rank, self.element_bytes) + self.scale_bytes
        index = 0 if self.index is None else self.index.token_bytes
        return latent + _bytes_of(self.rope_dim, self._rope_element_bytes) + index

    def content_bytes(self, num_tokens: int, tp: int = 1) -> int:
        """What so many tokens take, block or no block."""
        return cdiv(num_tokens, self.compression) * self.token_bytes(tp)

    def page_bytes(self, block_size: int, tp: int = 1) -> int:
        """What a block of `block_size` tokens takes on one of `tp` ranks."""
        kept = self.content_bytes(require_whole("block_size", block_size, 1), tp)
        return cdiv(kept, self.page_multiple) * self.page_multiple

    @property
    def _rope_element_bytes(self) -> float:
        return self.element_bytes if self.rope_element_bytes is None else self.rope_element_bytes


@dataclass(frozen=True, slots=True)
class State:
    """A state of fixed size, however long the request: Mamba, linear attention, short convolutions, RWKV.

    The bytes are those of the whole layer. Ranks divide them by heads, and must divide `num_heads`. What belongs to
    groups of heads (B and C in the convolution of Mamba 2) is replicated once there are more ranks than groups.

    With k the kernel: Mamba 2 keeps a convolution of (k - 1) x heads x head_dim and, a group, (k - 1) x 2 x state_size
    elements, and a recurrent state of heads x head_dim x state_size. Gated delta nets: (k - 1) x (2 x key heads x key
    dim + value heads x value dim), and value heads x key dim x value dim. Mamba 1: channels for heads, head_dim 1.
    """

    num_heads: int
    """Value heads; channels where there are no heads."""
    conv_bytes: int = 0
    recurrent_bytes: int = 0
    num_groups: int = 1
    group_bytes: int = 0
    """Of one group."""
    kind: StateSpace = StateSpace()  # noqa: RUF009

    can_pad: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("num_heads", 1), ("num_groups", 1)):
            require_whole(name, getattr(self, name), least)
        for name in ("conv_bytes", "recurrent_bytes", "group_bytes"):
            require_whole(name, getattr(self, name), 0)
        _require_kind(self.kind, StateSpace)
        divided = self.conv_bytes + self.recurrent_bytes
        if not divided + self.group_bytes:
            raise ConfigError("a state of 0 bytes: a layer that keeps nothing is EncoderOnly() or SharedKV(source)")
        if divided % self.num_heads:
            raise ConfigError(
                f"{divided:,} bytes of state are no whole number for each of {self.num_heads} heads: "
                f"{divided // self.num_heads * self.num_heads:,} is the next below that is"
            )

    def state_bytes(self, tp: int = 1) -> int:
        """What the state takes on one of `tp` ranks. ConfigError unless the ranks divide the heads."""
        require_whole("tp", tp, 1)
        if self.num_heads % tp:
            nearest = max(ranks for ranks in range(1, min(self.num_heads, tp) + 1) if self.num_heads % ranks == 0)
            raise ConfigError(
                f"a state of {self.num_heads} heads cannot be split over {tp} ranks: the nearest below is {nearest}"
            )
        groups = heads_per_rank(self.num_groups, tp, "groups of state heads") if self.group_bytes else 0
        return (self.conv_bytes + self.recurrent_bytes) // tp + groups * self.group_bytes

    def content_bytes(self, num_tokens: int, tp: int = 1) -> int:
        """`state_bytes`, however many tokens."""
        return self.state_bytes(tp) if num_tokens else 0

    def page_bytes(self, block_size: int, tp: int = 1) -> int:
        """`state_bytes`, whatever the block size: a block keeps one state."""
        require_whole("block_size", block_size, 1)
        return self.state_bytes(tp)


@dataclass(frozen=True, slots=True)
class SharedKV:
    """A layer that reads the keys and values of an earlier one, and keeps none: the last layers of Gemma 3n."""

    source: int | str
    """The layer that keeps them."""


@dataclass(frozen=True, slots=True)
class EncoderOnly:
    """A layer that looks at the tokens of its own step alone, or at none: nothing is kept."""


CachedSpec: TypeAlias = Attention | Latent | State
"""Layers that keep something of their own."""

LayerSpec: TypeAlias = CachedSpec | SharedKV | EncoderOnly


def heads_per_rank(num_heads: int, tp: int, heads: str = "heads") -> int:
    """How many of `num_heads` heads one of `tp` ranks has: an equal share, and one where ranks have to share a head.

    ConfigError when neither number divides the other, with the nearest number of ranks that works.
    """
    require_whole("tp", tp, 1)
    if num_heads % tp == 0 or tp % num_heads == 0:
        return max(1, num_heads // tp)
    multiple = tp // num_heads * num_heads
    working = [ranks for ranks in range(1, num_heads + 1) if num_heads % ranks == 0]
    nearest = min([*working, *filter(None, (multiple, multiple + num_heads))], key=lambda ranks: abs(ranks - tp))
    raise ConfigError(
        f"{num_heads} {heads} cannot be split over {tp} ranks, as neither divides the other: "
        f"the nearest that works is {nearest}"
    )


def require_whole(name: str, value: int, least: int) -> int:
    """`value`; ConfigError unless it is a whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}: a whole number of {least} or more")
    return value


def _bytes_of(num_elements: int, element_bytes: float) -> int:
    """Rounded up. In bits, so that no fraction is ever rounded."""
    bits = element_bytes * 8
    if not isinstance(bits, int | float) or bits < 1 or bits % 1 != 0:
        raise ConfigError(f"element_bytes is {element_bytes!r}: a whole number of bits, such as 2, 1 or 0.5 bytes")
    return cdiv(num_elements * int(bits), 8)


def _require_kind(kind: LayerKind, allowed: object) -> None:
    if not isinstance(kind, allowed):  # type: ignore[arg-type]
        raise ConfigError(f"kind is {kind!r}: a state has StateSpace(), all else FullAttention() or another of tokens")
    if kind.block_size is not None:
        raise ConfigError(f"kind is {kind!r}: the layout finds the block size, so leave it out")
