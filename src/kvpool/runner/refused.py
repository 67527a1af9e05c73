"""Models that this engine does not compute, and why.

Knows nothing of: weights, blocks.
"""

from typing import Any

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
    return _KINDS.get(text.model_type)
