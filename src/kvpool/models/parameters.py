"""How many parameters a model has, layer by layer, by the fields of its configuration.

The words of the family's pattern say which layers have attention and which a state, the row of `traits` what their
weights are like. Buffers are not counted: the corrections of routers, tables of hashes.

Knows nothing of: bytes, quantisation, ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.experts import (
    dense_mlp,
    experts,
    experts_beside_mlp,
    layers_with_experts,
    num_experts,
    shared_experts,
)
from kvpool.models.families import Family
from kvpool.models.fields import Fields
from kvpool.models.heads import entry, head_dim, listed_heads, num_key_value_heads, own, whole_entry
from kvpool.models.projections import (
    Heads,
    attention,
    block_index,
    compressed_attention,
    latent_attention,
    predicted_streams,
    stream_mixers,
)
from kvpool.models.recurrences import RECURRENCES
from kvpool.models.towers import encoder_of, relative_bias, tower
from kvpool.models.traits import holds, traits_of
from kvpool.models.weights import Linear, Parameters, Part, Weight, Weights, norm


def count_parameters(fields: Fields, family: Family, words: Sequence[str]) -> Parameters:
    """All weights of a model whose layers are `words`.

    ConfigError for a model type whose weights are not known, and for a field that is needed and absent. What was
    assumed is told in `fields.assumed`.
    """
    return _Counter(fields, family, words).parameters()


def _paths(word: str) -> list[str]:
    """Those with weights of their own: what a layer keeps beside the keys of its attention has none."""
    paths = word.split("+")
    first = next((path for path in paths if path not in _NO_ATTENTION), None)
    return [path for path in paths if path in _NO_ATTENTION or path == first]


_NO_ATTENTION = ("state", "cross", "none")
"""All other words are of attention to the tokens of the request itself."""


def _lists(fields: Fields, num_layers: int) -> list[Sequence[Any]]:
    """The fields that have an entry for each layer, those of inner objects too."""
    values = list(fields.config.values())
    values += [inner for value in values if isinstance(value, Mapping) for inner in value.values()]
    return [value for value in values if isinstance(value, str | list | tuple) and len(value) >= num_layers]


class _Counter:
    """The weights of one model."""

    def __init__(self, fields: Fields, family: Family, words: Sequence[str]) -> None:
        self._fields = fields
        self._family = family
        self._words = words
        self._traits = traits_of(fields)
        self._hidden = fields.whole("hidden_size")
        self._has_experts = layers_with_experts(fields, len(words))
        self._num_own = len(words) - fields.whole_or("num_shared_layers", 0)
        self._alike: dict[tuple[object, ...], Weights] = {}
        self._lists = _lists(fields, len(words))

    def parameters(self) -> Parameters:
        layers = tuple(self._interned(index) for index in range(len(self._words)))
        is_tied = self._is_tied()
        return Parameters(
            first=tuple(self._first()),
            layers=layers,
            last=tuple(self._last(is_tied)),
            is_tied=is_tied,
            draft=self._draft(layers),
        )

    def _interned(self, index: int) -> Weights:
        """Layers alike are one tuple: those of which all lists say the same."""
        key = (
            *(self._words[index], self._has_experts[index], index < self._num_own, index == 0),
            *(str(entries[index]) for entries in self._lists),
        )
        if key not in self._alike:
            self._alike[key] = tuple(self._layer(index, self._words[index]))
        return self._alike[key]

    def _layer(self, index: int, word: str) -> Iterator[Weight]:
        yield from self._norms(1 if self._traits.one_mixer else self._num_norms())
        for path in _paths(word):
            yield from self._mixer(index, path)
        if not self._traits.one_mixer:
            yield from self._mlp(index)
        elif word == "none":
            yield from self._only_mlp(index)
        yield from self._beside(index)

    def _norms(self, count: int) -> Iterator[Weight]:
        for _ in range(count):
            yield norm("layernorm", self._hidden, has_bias=holds(self._traits.norm_bias, self._fields))

    def _num_norms(self) -> int:
        """Two, before its halves, where a Falcon of the new architecture has both at once."""
        return 2 if self._fields.flag("new_decoder_architecture") else self._traits.num_norms

    def _mixer(self, index: int, path: str) -> Iterator[Weight]:
        fields, heads = self._fields, listed_heads(self._fields, index)
        recurrence = RECURRENCES.get(self._family.parts.get(path))
        if path == "none" or heads == 0:
            return
        if recurrence is not None:
            yield from recurrence(fields, self._traits)
        elif path == "state":
            raise ConfigError(f"the weights of the states of {fields.model_type!r} models are not known")
        elif fields.has("compress_ratios"):
            yield from compressed_attention(fields, whole_entry(fields, "compress_ratios", index))
            yield from stream_mixers(fields)
        elif fields.has("kv_lora_rank"):
            yield from latent_attention(fields, has_index=self._has_index(index))
        else:
            yield from self._attention(index, path, heads)

    def _has_index(self, index: int) -> bool:
        """Unless it shares what an earlier layer chose."""
        if not self._fields.has("indexer_types"):
            return self._fields.has("index_head_dim")
        return bool(entry(self._fields, "indexer_types", index) != "shared")

    def _attention(self, index: int, path: str, listed: int | None) -> Iterator[Weight]:
        heads, traits = self._heads(index, path, listed), self._traits
        if path == "cross" and traits.has_cross_gates:
            traits = replace(traits, qk_norm="head")
            yield Weight(Part.ATTENTION, "cross_attn.gates", 2)
        yield from attention(self._fields, traits, heads, "encoder_attn" if path == "cross" else "self_attn")
        yield from block_index(self._fields, index)

    def _heads(self, index: int, path: str, listed: int | None) -> Heads:
        fields, names = self._fields, self._family.own_names.get(path, {})
        dim = own(fields, names, "head_dim") or head_dim(fields)
        return Heads(
            num_heads=own(fields, names, "num_attention_heads") or fields.whole("num_attention_heads"),
            num_kv_heads=listed or own(fields, names, "num_key_value_heads") or num_key_value_heads(fields),
            head_dim=dim,
            head_dim_v=fields.whole_or("v_head_dim", 0) or dim,
            has_keys=index < self._num_own,
            has_values=not (path == "full" and fields.flag("attention_k_eq_v")),
        )

    def _mlp(self, index: int) -> Iterator[Weight]:
        fields, traits = self._fields, self._traits
        is_narrow = index < self._num_own or not fields.flag("use_double_wide_mlp")
        if traits.mlp_beside_experts:
            yield from dense_mlp(fields, traits, index, is_narrow=is_narrow)
            if self._has_experts[index]:
                yield from experts_beside_mlp(fields, traits)
        elif self._has_experts[index]:
            yield from experts(fields, traits)
        elif traits.shared_width == "shared_intermediate_size" and not num_experts(fields):
            yield from shared_experts(fields, traits, 0)
        else:
            yield from dense_mlp(fields, traits, index)

    def _only_mlp(self, index: int) -> Iterator[Weight]:
        """Of a layer that is nothing else: experts or a dense MLP, by its letter or its entry in the list."""
        entries = self._fields.get("hybrid_override_pattern") or self._fields.get("layers_block_type") or ()
        if index < len(entries) and entries[index] in ("E", "moe"):
            yield from experts(self._fields, self._traits)
        else:
            yield from dense_mlp(self._fields, self._traits, index)

    def _beside(self, index: int) -> Iterator[Weight]:
        width = self._fields.whole_or("hidden_size_per_layer_input", 0)
        if width:
            yield from Linear(Part.MLP, "per_layer_input_gate", width, self._hidden)
            yield from Linear(Part.MLP, "per_layer_projection", self._hidden, width)
            yield norm("post_per_layer_input_norm", self._hidden)
        yield from predicted_streams(self._fields)
        yield from relative_bias(self._fields, index)

    def _first(self) -> Iterator[Weight]:
        fields, vocabulary = self._fields, self._fields.whole("vocab_size")
        rows = vocabulary + self._traits.num_extra_embeddings
        yield Weight(Part.EMBEDDINGS, "embed_tokens", rows, self._hidden, num_units=rows)
        if self._traits.positions:
            count = fields.whole("max_model_len") + self._traits.num_extra_positions
            yield Weight(Part.EMBEDDINGS, "embed_positions", count, self._hidden)
        if self._traits.has_embedding_norm:
            yield from self._norms(1)
        width = fields.whole_or("hidden_size_per_layer_input", 0)
        if width:
            rows, total = fields.whole("vocab_size_per_layer_input"), width * len(self._words)
            yield Weight(Part.EMBEDDINGS, "embed_tokens_per_layer", rows, total, num_units=rows)
            yield from Linear(Part.MLP, "per_layer_model_projection", total, self._hidden)
            yield norm("per_layer_projection_norm", width)
        if fields.has("altup_num_inputs"):
            streams = 2 * (fields.whole("altup_num_inputs") - 1)
            yield from Linear(Part.MLP, "altup_projections", self._hidden, self._hidden, num_copies=streams)
        yield from encoder_of(fields, self._traits)
        yield from tower(fields)

    def _last(self, is_tied: bool) -> Iterator[Weight]:
        vocabulary, has_bias = self._fields.whole("vocab_size"), holds(self._traits.head_bias, self._fields)
        yield from self._norms(self._traits.num_norms_final)
        if self._fields.has("hc_mult"):
            streams = self._fields.whole("hc_mult")
            yield Weight(Part.NORMS, "hc_head", streams * (streams * self._hidden + 1) + 1)
        if not is_tied:
            yield from Linear(Part.HEAD, "lm_head", vocabulary, self._hidden, vocabulary, has_bias)

    def _is_tied(self) -> bool:
        if self._fields.has("tie_word_embeddings"):
            return self._fields.flag("tie_word_embeddings")
        tied = "the embeddings" if self._traits.is_tied else "a weight of its own"
        self._fields.assume(f"the head is {tied}, as is usual for {self._fields.model_type}")
        return self._traits.is_tied

    def _draft(self, layers: Sequence[Weights]) -> tuple[Weights, ...]:
        """Each: the last layer with attention (and the last with experts, where layers are one or the other), a
        projection of embeddings and hidden states, and three norms."""
        num_layers = self._fields.whole_or("num_draft_layers", 0) * self._fields.whole_or("mtp_transformer_layers", 1)
        if not num_layers:
            return ()
        joined = (*Linear(Part.MLP, "eh_proj", self._hidden, 2 * self._hidden), *self._norms(3))
        return tuple((*joined, *self._draft_layer(layers)) for _ in range(num_layers))

    def _draft_layer(self, layers: Sequence[Weights]) -> Weights:
        with_attention = [layer for layer in layers if any(weight.part == Part.ATTENTION for weight in layer)]
        if not with_attention:
            return ()
        if not self._traits.one_mixer:
            return with_attention[-1]
        with_experts = [layer for layer in layers if any(weight.part == Part.EXPERTS for weight in layer)]
        return with_attention[-1] + (with_experts[-1] if with_experts else ())
