"""Models that this engine does not compute, and why; lengths up to which it computes others.

Knows nothing of: weights, blocks.
"""

from collections.abc import Mapping
from typing import Any

_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotations that transformers chooses for a whole call, by its last position."""
_KINDS = {
    "recurrent_gemma": "keeps its recurrent state on its own modules",
    "minimax": "has a cache of its own kind",
}


def why_refused(config: Any) -> str | None:
    """What stands behind "a t5 model"; None where nothing in the configuration is against it."""
    if config.is_encoder_decoder:
        return "has an encoder, which this engine does not run"
    text = config.get_text_config(decoder=True)
    if getattr(text, "index_topk", None):
        return "looks at tokens that an index chooses, which this engine does not compute"
    # gpt_neox says that it is no decoder, too, and is one; kinds of tokens are of BERT and its kin.
    if not getattr(text, "is_decoder", True) and hasattr(text, "type_vocab_size"):
        return "looks at texts in both directions, and does not continue them"
    return _KINDS.get(text.model_type)


def longest_alike(config: Any) -> int | None:
    """Up to how many tokens all requests are rotated alike; None where that is always so.

    Beyond it a long request would change what is computed for others in its step, and what is cached of them.
    """
    text = config.get_text_config(decoder=True)
    told = getattr(text, "rope_parameters", None) or {}
    each = [told] if "rope_type" in told else [part for part in told.values() if isinstance(part, Mapping)]
    limits = [
        part.get("original_max_position_embeddings") or text.max_position_embeddings
        if part["rope_type"] == "longrope"
        else text.max_position_embeddings
        for part in each
        if part.get("rope_type") in _BY_LENGTH
    ]
    return min(limits, default=None)
