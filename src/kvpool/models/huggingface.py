"""A Hugging Face `config.json` to what every layer keeps.

The family's row says how the file is meant; the rest is the same for all. Nothing is guessed: what is missing, unknown
or might change what a layer keeps is an error that names the field, and a class default that had to be assumed is told.

Knows nothing of: memory, blocks, files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from kvpool.errors import ConfigError
from kvpool.models.dtypes import ASKED_DTYPE, KVDtype, element_bytes, kv_dtype, served_dtype
from kvpool.models.families import BY_MODEL_TYPE, FAMILIES, Family
from kvpool.models.fields import MOST, Config, Fields, language_part
from kvpool.models.heads import entry, head_dim, listed_heads, num_key_value_heads, own
from kvpool.models.patterns import fields_of, num_listed, words_of
from kvpool.models.quantization import UNKNOWN, kv_dtype_of_checkpoint
from kvpool.plan.kinds import ChunkedLocal, CrossAttention, FullAttention, SlidingWindow
from kvpool.plan.model import Layer, Model
from kvpool.plan.spec import (
    Attention,
    CachedSpec,
    EncoderOnly,
    IndexCache,
    Latent,
    LayerSpec,
    SharedKV,
    TokenKind,
)

_ATTENTION = ("full", "window", "chunk", "cross")
MAX_LAYERS = 100_000
"""More is a typing error, and would only take long."""


def read_model(
    config: Config,
    *,
    name: str | None = None,
    kv_dtype: str = "auto",
    dtype: str | None = None,
    model_type: str | None = None,
) -> Model:
    """The model of a decoded `config.json`.

    `kv_dtype` is one of `dtypes.KV_DTYPES`. `dtype` and `model_type` take the place of what the file says; the latter
    makes a model of an unknown type be read as one of a known. ConfigError names the field that is missing, unknown,
    or may change what a layer keeps in a way that is not known.
    """
    fields, family = open_config(config, dtype=dtype, model_type=model_type)
    kept_in = _kv_dtype(fields, kv_dtype)
    reader = _Reader(fields, family, kept_in)
    layers = tuple(_layers(fields, family, reader))
    model = Model(
        name=name or str(config.get("_name_or_path") or fields.model_type),
        layers=layers,
        kv_dtype=served_dtype(fields) if kept_in.element_bytes is None else kept_in.name,
        max_model_len=_max_model_len(fields) or _length_of_states(fields, layers),
        num_encoder_tokens=_num_encoder_tokens(fields, layers),
        draft=_draft(fields, reader, family),
    )
    if any(not isinstance(spec, EncoderOnly) for layer in layers for spec in layer):
        own = {path.partition(".")[0] for name in fields_of(family.pattern) for path in fields.names(name)}
        _require_understood(fields, own)
    return replace(model, assumed=tuple(fields.assumed))


def open_config(config: Config, *, dtype: str | None = None, model_type: str | None = None) -> tuple[Fields, Family]:
    """The fields of the language part, and the row that tells what they mean."""
    if dtype is not None:
        element_bytes(dtype)
    given = {ASKED_DTYPE: dtype, "model_type": model_type}
    given_ones = {key: value for key, value in given.items() if value is not None}
    part: Config = {**language_part(config), **given_ones}
    family = family_of(part)
    if family.rewrite is not None:
        part = family.rewrite(part)
    return Fields(part, family.aliases, family.defaults), family


def layer_words(fields: Fields, family: Family) -> list[str]:
    """The word of each layer's kind, as `patterns` has them; a window that is not in use is none."""
    num_layers = _num_layers(fields, family)
    return [_in_use(word, fields) for word in words_of(family.pattern, fields, num_layers)]


def family_of(part: Config) -> Family:
    """The row of a language part. ConfigError when there is none."""
    model_type = part.get("model_type")
    if model_type is None:
        raise ConfigError("the configuration lacks model_type: it tells how the other fields are meant")
    family = BY_MODEL_TYPE.get(str(model_type))
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} is not known, so neither is what its layers keep: "
            "if they keep what those of a known type do, name that one (--model-type llama)"
        )
    return family


def _layers(fields: Fields, family: Family, reader: "_Reader") -> Iterator[Layer]:
    words = layer_words(fields, family)
    num_layers = len(words)
    num_own = num_layers - fields.whole_or("num_shared_layers", 0)
    if num_own < 1:
        raise fields.wrong("num_shared_layers", f"fewer than the {num_layers} layers have to share")
    for index, word in enumerate(words):
        yield reader.layer(word, index) if index < num_own else (_shared(fields, words, index, num_own),)


def _num_layers(fields: Fields, family: Family) -> int:
    listed = None if fields.has("num_hidden_layers") else num_listed(family.pattern, fields)
    num_layers = listed or fields.whole("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", f"at most {MAX_LAYERS:,}")
    return num_layers


def _in_use(word: str, fields: Fields) -> str:
    """A window that is switched off, or that no request reaches the end of, is none."""
    if word != "window":
        return word
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return "full"
    context = _max_model_len(fields)
    return "full" if context is not None and fields.whole("sliding_window") >= context else "window"


def _shared(fields: Fields, words: Sequence[str], index: int, num_own: int) -> SharedKV:
    """The last layer of the same kind that keeps its own is read."""
    sources = [source for source in range(num_own) if words[source] == words[index]]
    if not sources:
        raise fields.wrong("num_shared_layers", f"no layer before layer {num_own} is of the kind of layer {index}")
    return SharedKV(sources[-1])


def _kv_dtype(fields: Fields, name: str) -> KVDtype:
    calibrated = kv_dtype_of_checkpoint(fields.get("quantization_config")) if name == "auto" else None
    if calibrated == UNKNOWN:
        fields.assume("KV dtype as the model's: what the checkpoint says of its cache is not known")
        calibrated = None
    if calibrated is not None:
        fields.assume(f"KV dtype {calibrated}, which the checkpoint was calibrated for")
    return kv_dtype(calibrated or name)


class _Reader:
    """What the layers of one model keep, word by word."""

    def __init__(self, fields: Fields, family: Family, dtype: KVDtype) -> None:
        self._fields = fields
        self._family = family
        self._dtype = dtype
        self._by_word: dict[tuple[str, int | None, bool], Layer] = {}

    def layer(self, word: str, index: int | None = None) -> Layer:
        """The specs of layer `index`, or of one beside the model's. Layers of equal words share them, but for lists."""
        heads = None if index is None else listed_heads(self._fields, index)
        key = (word, heads, self._has_index(index))
        if key not in self._by_word:
            self._by_word[key] = tuple(self._specs(word, heads, key[2]))
        return self._by_word[key]

    def _specs(self, word: str, heads: int | None, has_index: bool) -> Iterator[LayerSpec]:
        for part in word.split("+"):
            if part == "none" or heads == 0:
                yield EncoderOnly()
            elif part in self._family.parts:
                yield from self._family.parts[part](self._fields)
            elif part not in _ATTENTION:
                raise ConfigError(
                    f"the layers of this {self._fields.model_type!r} model are {part!r} in part, "
                    "and what such a layer of it keeps is not known"
                )
            else:
                of_model = element_bytes(served_dtype(self._fields))
                yield self._dtype.keep(self._attention(part, heads, has_index), of_model)

    def _attention(self, word: str, heads: int | None, has_index: bool) -> CachedSpec:
        fields, kind = self._fields, self._kind(word)
        fields.get("v_head_dim")
        if fields.has("kv_lora_rank") and fields.get("use_mla") is not False:
            index = IndexCache(fields.whole("index_head_dim")) if has_index else None
            return Latent(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim", 0), index=index, kind=kind)
        names = self._family.own_names.get(word, {})
        return Attention(
            heads or own(fields, names, "num_key_value_heads") or num_key_value_heads(fields),
            own(fields, names, "head_dim") or head_dim(fields),
            head_dim_v=fields.whole("v_head_dim") if fields.whole_or("v_head_dim", 0) else None,
            kind=kind,
        )

    def _kind(self, word: str) -> TokenKind:
        match word:
            case "window":
                return SlidingWindow(self._fields.whole("sliding_window"))
            case "chunk":
                return ChunkedLocal(self._fields.whole("attention_chunk_size"))
            case "cross":
                return CrossAttention()
            case _:
                return FullAttention()

    def _has_index(self, index: int | None) -> bool:
        """Sparse layers keep index keys, unless they share those of an earlier layer."""
        if not self._fields.has("index_head_dim"):
            return False
        if not self._fields.has("indexer_types") or index is None:
            return True
        return bool(entry(self._fields, "indexer_types", index) != "shared")


def _max_model_len(fields: Fields) -> int | None:
    """The least of all that the file says, as vLLM takes it."""
    said = [fields.whole(name) for name in fields.names("max_model_len") if fields.has(name)]
    if said:
        return max(min(said), _scaled_len(fields))
    return fields.whole("max_model_len") if fields.has("max_model_len") else None


def _scaled_len(fields: Fields) -> int:
    """What positions that are scaled by YaRN reach; 0 without."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(scaling, Mapping) or "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return 0
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(original, int) and 0 < factor < MOST and 0 < original < MOST:
        return int(factor * original)
    return 0


def _length_of_states(fields: Fields, layers: Sequence[Layer]) -> int | None:
    """Where nothing grows any length will do."""
    if any(isinstance(spec, Attention | Latent) for layer in layers for spec in layer):
        return None
    fields.assume("max_model_len 2048, since the configuration has none; no layer keeps more of longer requests")
    return 2048


def _num_encoder_tokens(fields: Fields, layers: Sequence[Layer]) -> int:
    """How many tokens cross attention looks at, at most."""
    if not any(
        isinstance(spec, CachedSpec) and isinstance(spec.kind, CrossAttention) for layer in layers for spec in layer
    ):
        return 0
    return fields.whole("num_encoder_tokens")


_MATTERS = frozenset(
    (
        *("kv", "cache", "window", "latent", "lora", "share", "shared", "sharing", "cla", "compress", "compressed"),
        *("compression", "ssm", "state", "recurrent", "sparse", "sparsity", "index", "indexer", "pattern", "cross"),
        *("local", "chunk", "chunked", "conv", "memory", "sink", "sinks", "period", "interval"),
    )
)
"""An unread field with one of these words in its name could change what a layer keeps."""

_HARMLESS = re.compile(
    r"use_cache|cache_implementation|(mamba_)?chunk_size(_feed_forward)?|(use|mamba)_conv_bias|mamba_d_ssm|kv_channels"
    r"|.*(expert|moe|mlp|ffn|rope|norm|dropout|multiplier|embedding).*|shared_intermediate_size|decoder_sparse_step"
    r"|activation_sparsity_pattern|[qo]_lora_rank|index_(topk|n_heads|share|skip).*|blocksparse_.*|local_radius"
    r"|(add_)?cross_attention_(hidden|freq).*|add_cross_attention|sliding_window(_size)?|max_window_layers"
    r"|no_rope_layer_interval|no_rope_layers|use_sliding_window"
)
"""Known not to: they are of MLPs, positions, queries, kernels or other parts, or another name of what was read."""


_TELLS_KINDS = frozenset(
    (
        *(field for family in FAMILIES for field in fields_of(family.pattern)),
        *("mamba_layers", "layer_group_size", "global_head_dim", "attention_other_setting", "linear_attn_config"),
        *("num_key_value_heads_per_layer", "per_layer_config", "block_configs", "num_global_key_value_heads"),
    )
)
"""Fields by which some family tells its layers apart, or gives some of them a shape of their own."""


def _require_understood(fields: Fields, own_fields: Set[str]) -> None:
    """ConfigError for a field that nobody read and that may change what a layer keeps."""
    harmless = {"cla_share_factor"} if fields.get("use_cla") is False else set()
    for name in fields.unread():
        matters = name in _TELLS_KINDS or _MATTERS.intersection(name.split("_"))
        if matters and not _HARMLESS.fullmatch(name) and name not in own_fields | harmless:
            raise ConfigError(
                f"{name} in a {fields.model_type!r} configuration is not known, and may change what a layer keeps: "
                "take it out if it does not"
            )


def _draft(fields: Fields, reader: "_Reader", family: Family) -> tuple[Layer, ...]:
    """The model's own draft heads."""
    num_layers = fields.whole_or("num_draft_layers", 0) * fields.whole_or("mtp_transformer_layers", 1, 1)
    if num_layers > MAX_LAYERS:
        raise fields.wrong("num_draft_layers", f"at most {MAX_LAYERS:,}")
    return tuple(reader.layer(family.draft) for _ in range(num_layers))
