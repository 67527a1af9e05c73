"""The weights beside the language model: towers of images, by the fields of `vision_config`, and encoders.

Towers are served in 16 bits, their blocks divided by heads; what leads into them and out of them is on all ranks.

Knows nothing of: the layers of the language model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvpool.models.fields import Fields
from kvpool.models.heads import whole_entry
from kvpool.models.traits import Traits, holds
from kvpool.models.weights import Part, Weight


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a tower, all alike: attention as wide as the tower, an MLP, norms before both."""

    depth: int
    width: int
    mlp_width: int
    num_heads: int
    attention_bias: bool = True
    mlp_bias: bool = True
    is_gated: bool = False
    norm_width: int | None = None
    """Of all norms of a block together, biases too; None: two norms with biases."""

    def __iter__(self) -> Iterator[Weight]:
        gates = 3 if self.is_gated else 2
        matrices = self.width * (4 * self.width + gates * self.mlp_width)
        vectors = 4 * self.width if self.norm_width is None else self.norm_width
        vectors += 4 * self.width * self.attention_bias
        vectors += ((gates - 1) * self.mlp_width + self.width) * self.mlp_bias
        yield Weight(Part.TOWER, "tower.blocks", matrices, num_units=self.num_heads, num_copies=self.depth)
        yield Weight(Part.TOWER, "tower.blocks.norms", vectors, num_copies=self.depth)


def _linear(num_inputs: int, num_outputs: int) -> int:
    """A projection and its bias."""
    return num_inputs * num_outputs + num_outputs


def _around(*sizes: int) -> Weight:
    """What leads into the blocks and out of them."""
    return Weight(Part.TOWER, "tower.projector", sum(sizes))


def _patch(vision: Fields, frames: int = 1) -> int:
    return frames * vision.whole_or("num_channels", vision.whole_or("in_channels", 3)) * vision.whole("patch_size") ** 2


def _qwen2_5_vl(vision: Fields, hidden: int) -> Iterator[Weight]:
    width, mlp, heads = vision.whole("hidden_size"), vision.whole("intermediate_size"), vision.whole("num_heads")
    yield from Blocks(vision.whole("depth"), width, mlp, heads, is_gated=True, norm_width=2 * width)
    merged = width * vision.whole("spatial_merge_size") ** 2
    patch = _patch(vision, vision.whole("temporal_patch_size"))
    yield _around(patch * width, width, _linear(merged, merged), _linear(merged, hidden))


def _qwen3_vl(vision: Fields, hidden: int) -> Iterator[Weight]:
    """With a merger more for each layer that feeds the language model's first ones."""
    width, mlp, heads = vision.whole("hidden_size"), vision.whole("intermediate_size"), vision.whole("num_heads")
    yield from Blocks(vision.whole("depth"), width, mlp, heads)
    merged = width * vision.whole("spatial_merge_size") ** 2
    patch = _patch(vision, vision.whole("temporal_patch_size"))
    merger = _linear(merged, merged) + _linear(merged, hidden)
    deep = len(vision.sequence("deepstack_visual_indexes")) if vision.has("deepstack_visual_indexes") else 0
    positions = vision.whole("num_position_embeddings") * width
    yield _around(_linear(patch, width), positions, 2 * width, merger, deep * (merger + 2 * merged))


def _plain_blocks(vision: Fields) -> Blocks:
    heads, mlp = vision.whole("num_attention_heads"), vision.whole("intermediate_size")
    return Blocks(vision.whole("num_hidden_layers"), vision.whole("hidden_size"), mlp, heads)


def _num_patches(vision: Fields) -> int:
    return (vision.whole("image_size") // vision.whole("patch_size")) ** 2


def _siglip(vision: Fields, hidden: int) -> Iterator[Weight]:
    width = vision.whole("hidden_size")
    yield from _plain_blocks(vision)
    positions = _num_patches(vision) * width
    yield _around(_linear(_patch(vision), width), positions, 2 * width, width * hidden, width)


def _clip(vision: Fields, hidden: int) -> Iterator[Weight]:
    width = vision.whole("hidden_size")
    yield from _plain_blocks(vision)
    positions = (_num_patches(vision) + 1) * width
    projector = _linear(width, hidden) + _linear(hidden, hidden)
    yield _around(width, _patch(vision) * width, positions, 4 * width, projector)


def _minimax(vision: Fields, hidden: int) -> Iterator[Weight]:
    width, tokens = vision.whole("hidden_size"), "img_token_compression_config."
    yield from _plain_blocks(vision)
    merged = hidden * vision.whole(f"{tokens}spatial_merge_size") ** 2
    projector = _linear(width, hidden) + 2 * _linear(hidden, hidden) + _linear(merged, hidden)
    yield _around(_patch(vision, vision.whole(f"{tokens}temporal_patch_size")) * width, 2 * width, projector)


def _gemma4(vision: Fields, hidden: int) -> Iterator[Weight]:
    width, heads = vision.whole("hidden_size"), vision.whole("num_attention_heads")
    mlp, norms = vision.whole("intermediate_size"), 4 * width + 2 * vision.whole("head_dim")
    depth = vision.whole("num_hidden_layers")
    yield from Blocks(depth, width, mlp, heads, attention_bias=False, mlp_bias=False, is_gated=True, norm_width=norms)
    positions = 2 * vision.whole("position_embedding_size") * width
    yield _around(positions, _patch(vision) * width, width * hidden)


def _kimi(vision: Fields, hidden: int) -> Iterator[Weight]:
    """Not divided: vLLM has all of it on every rank."""
    width, mlp = vision.whole("vt_hidden_size"), vision.whole("vt_intermediate_size")
    yield from Blocks(vision.whole("vt_num_hidden_layers"), width, mlp, num_heads=1)
    rows, columns = (whole_entry(vision, "merge_kernel_size", at) for at in (0, 1))
    positions = vision.whole("init_pos_emb_height") * vision.whole("init_pos_emb_width") * width
    merged = width * rows * columns
    projector = _linear(merged, merged) + _linear(merged, hidden)
    yield _around(_linear(_patch(vision), width), positions, 4 * width, projector)


def _mllama(vision: Fields, hidden: int) -> Iterator[Weight]:
    """Two stacks, the second with gates; embeddings for each arrangement of tiles."""
    width, mlp, heads = vision.whole("hidden_size"), vision.whole("intermediate_size"), vision.whole("attention_heads")
    depth = (vision.whole("num_hidden_layers"), vision.whole("num_global_layers"))
    yield from Blocks(depth[0], width, mlp, heads, attention_bias=False)
    yield from Blocks(depth[1], width, mlp, heads, attention_bias=False, norm_width=4 * width + 2)
    tiles, arrangements = vision.whole("max_num_tiles"), len(vision.sequence("supported_aspect_ratios")) + 1
    patches = _num_patches(vision) + 1
    positions = patches * width + arrangements * tiles * width * (patches + 2) + 3
    projector = _linear(vision.whole("vision_output_dim"), hidden)
    yield _around(width, _patch(vision) * width, positions, 4 * width, projector)


def _pixtral(vision: Fields, hidden: int) -> Iterator[Weight]:
    """Norms without biases; patches merged two by two."""
    width, mlp, heads = (
        vision.whole("hidden_size"),
        vision.whole("intermediate_size"),
        vision.whole("num_attention_heads"),
    )
    norms, depth = 2 * width, vision.whole("num_hidden_layers")
    yield from Blocks(depth, width, mlp, heads, attention_bias=False, mlp_bias=False, is_gated=True, norm_width=norms)
    merged = width * vision.whole_or("spatial_merge_size", 2, 1) ** 2
    projector = width + merged * width + width * hidden + hidden * hidden
    yield _around(_patch(vision) * width, width, projector)


def _llama4(vision: Fields, hidden: int) -> Iterator[Weight]:
    width = vision.whole("hidden_size")
    yield from _plain_blocks(vision)
    inner, outer = vision.whole("projector_input_dim"), vision.whole("projector_output_dim")
    projector = vision.whole("intermediate_size") * inner + inner * outer
    output = vision.whole("vision_output_dim") * hidden
    positions = (_num_patches(vision) + 1) * width
    yield _around(width, positions, _patch(vision) * width, 4 * width, projector, output)


_Tower = Callable[[Fields, int], Iterator[Weight]]
_BY_LANGUAGE_MODEL: Mapping[str, _Tower] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_5_vl_text": _qwen2_5_vl,
    "qwen3_vl_text": _qwen3_vl,
    "qwen3_vl_moe_text": _qwen3_vl,
    "qwen3_5_text": _qwen3_vl,
    "qwen3_5_moe_text": _qwen3_vl,
    "gemma3_text": _siglip,
    "gemma4_text": _gemma4,
    "kimi_k2": _kimi,
    "deepseek_v3": _kimi,
    "mllama_text_model": _mllama,
    "mistral": _pixtral,
    "ministral3": _pixtral,
    "llama4_text": _llama4,
    "minimax_m3_vl": _minimax,
    "llama": _clip,
}
_HINTS = ("vision_config", "mm_vision_tower", "img_processor", "vision_tower", "audio_config", "audio_tower")
"""Fields that tell of a tower, of images or of sound."""


def tower(fields: Fields) -> Iterator[Weight]:
    """The weights of the image tower; those of a tower that is not known are left out, and that is told."""
    name = next((name for name in _HINTS if fields.get(name)), None)
    if name is None:
        return
    read, config = _BY_LANGUAGE_MODEL.get(fields.model_type), fields.get("vision_config")
    if read is None or not isinstance(config, Mapping):
        fields.assume(f"no weights of a tower, though there is {name}: its layers are not known")
        return
    yield from read(Fields({"model_type": fields.model_type, **config}), fields.whole("hidden_size"))


def encoder_of(fields: Fields, traits: Traits) -> Iterator[Weight]:
    """The encoder of sound (Whisper) or of text (T5) that the layers' cross attention looks at."""
    if fields.model_type == "whisper":
        yield from _sound_encoder(fields)
    elif fields.has("relative_attention_num_buckets"):
        yield from _text_encoder(fields, holds(traits.is_gated, fields))


def _sound_encoder(fields: Fields) -> Iterator[Weight]:
    """Two convolutions of three frames, positions, and blocks whose keys have no biases."""
    hidden, bands = fields.whole("hidden_size"), fields.whole("num_mel_bins")
    heads, mlp = fields.whole("encoder_attention_heads"), fields.whole("encoder_ffn_dim")
    yield from Blocks(fields.whole("encoder_layers"), hidden, mlp, heads, norm_width=3 * hidden)
    convolutions = 3 * hidden * (bands + hidden) + 2 * hidden
    yield _around(convolutions, fields.whole("num_encoder_tokens") * hidden, 2 * hidden)


def _text_encoder(fields: Fields, is_gated: bool) -> Iterator[Weight]:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    inner, depth = heads * fields.whole("head_dim"), fields.whole("num_layers")
    mlp = (3 if is_gated else 2) * hidden * fields.whole("intermediate_size")
    yield Weight(Part.TOWER, "encoder.block", 4 * hidden * inner + mlp, num_units=heads, num_copies=depth)
    yield Weight(Part.TOWER, "encoder.block.norms", 2 * hidden, num_copies=depth)
    yield _around(hidden, fields.whole("relative_attention_num_buckets") * heads)


def relative_bias(fields: Fields, index: int) -> Iterator[Weight]:
    """A bias for each distance and head, in the first layer alone (T5)."""
    if index == 0 and fields.has("relative_attention_num_buckets"):
        heads = fields.whole("num_attention_heads")
        size = fields.whole("relative_attention_num_buckets") * heads
        yield Weight(Part.ATTENTION, "relative_attention_bias", size, num_units=heads)
