"""A model from its folder, ready to compute: weights, tokenizer, and what ends its texts.

Knows nothing of: blocks, how its attention and its cache are replaced.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, MissingExtraError
from kvpool.runner.folders import find_folder
from kvpool.runner.refused import why_refused

try:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    raise MissingExtraError(error.name or "torch", "engine") from error

DTYPES = ("auto", "float32", "bfloat16", "float16")

_FAILURES = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`model` is in evaluation mode on its device. A `tokenizer` only where the folder has one."""

    name: str
    folder: Path
    model: PreTrainedModel
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    """Any of these ends a text."""

    @property
    def config(self) -> Any:
        """Of the language part, as transformers has it, class defaults filled in."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> str:
        """Of the weights: float32, bfloat16, float16."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        """Token ids that it has rows for."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def max_model_len(self) -> int | None:
        """The longest request that it was made for; None where its configuration has none."""
        return getattr(self.config, "max_position_embeddings", None)


def load(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    allow_download: bool = False,
    requires_tokenizer: bool = False,
) -> LoadedModel:
    """The model of a local folder in Hugging Face form, or "demo". `dtype` "auto": as its weights are kept.

    ConfigError for what cannot be served, before any weights are read; MissingExtraError for what has to be installed.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: {', '.join(DTYPES)} are known")
    on = require_device(device)
    folder = find_folder(model, allow_download=allow_download)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and requires_tokenizer:
        raise ConfigError(f"{folder}: no tokenizer is there, and a server takes texts")
    loaded = _weights(folder, config, dtype).to(on)
    return LoadedModel(folder.resolve().name, folder, loaded, tokenizer, _eos_token_ids(loaded, tokenizer))


def read_config(folder: Path) -> Any:
    """The configuration as transformers has it. ConfigError for a model that cannot be served through this cache."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _FAILURES as error:
        raise ConfigError(f"{folder}: the configuration cannot be read: {error}") from None
    kind = config.model_type
    if why := why_refused(config):
        raise ConfigError(f"{folder}: a {kind} model {why}")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"{folder}: transformers has no model of type {kind} that continues texts")
    return config


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer; None where the folder has none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _FAILURES as error:
        raise ConfigError(f"{folder}: the tokenizer cannot be read: {error}") from None


def require_device(name: str) -> Any:
    """The device of this name. ConfigError when there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}: cpu or cuda, or one of several as cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and torch sees no such device here: cpu works")
    return device


def _weights(folder: Path, config: Any, dtype: str) -> PreTrainedModel:
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except _FAILURES as error:
        raise ConfigError(f"{folder}: the weights cannot be read: {error}") from None
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"{folder}: the weights lack {_some(missing)}")
    return model.eval().requires_grad_(False)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    """What the folder says anywhere: a chat's end is often named by one of its files only."""
    said = (model.generation_config, model.config.get_text_config(decoder=True), tokenizer)
    ids: set[int] = set()
    for each in said:
        named = getattr(each, "eos_token_id", None)
        ids.update(named if isinstance(named, list | tuple) else () if named is None else (named,))
    return frozenset(ids)
