"""The fields of a `config.json`: found under whichever name, remembered when read, and complained about by name.

A canonical name stands for all that a field is called in the field; `ALIASES` has them, and a family of models may have
others. What is read, what was assumed, and what was left unread is remembered, so that a field that might change what
a layer keeps is never passed over in silence.

Knows nothing of: what the fields mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from kvpool.errors import ConfigError

Config: TypeAlias = Mapping[str, Any]
"""A `config.json`, decoded."""

NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config")
"""Where models of several parts have their language model."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "kv_n_heads",
        "attn_config.kv_n_heads",
        "num_attention_groups",
    ),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim", "d_kv"),
    "v_head_dim": ("v_head_dim", "head_dim_v", "value_head_dim"),
    "intermediate_size": (
        "intermediate_size",
        "n_inner",
        "ffn_hidden_size",
        "ff_intermediate_size",
        "ffn_dim",
        "d_ff",
        "ffn_config.ffn_hidden_size",
    ),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_k",
        "ffn_config.moe_top_k",
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size"),
    "max_model_len": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_sequence_length",
        "max_target_positions",
        "n_ctx",
    ),
    "dtype": ("dtype", "torch_dtype"),
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size"),
    "attention_chunk_size": ("attention_chunk_size",),
    "kv_lora_rank": ("kv_lora_rank",),
    "num_shared_layers": ("num_kv_shared_layers",),
    "num_draft_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    "state_dtype": ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
    "state_size": ("ssm_state_size", "mamba_d_state", "state_size"),
    "state_heads": ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"),
    "state_head_dim": ("mamba_head_dim", "mamba_d_head", "mamba_headdim"),
    "state_groups": ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    "state_expand": ("expand", "mamba_expand"),
    "conv_kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "d_conv", "conv1d_width"),
}
"""What is called by one name here: all its names in configuration files, the first that is there counts."""

MOST = 2**40
"""No field of a model is a larger number, so one that is must be a mistake."""

_ABSENT = object()


class Fields:
    """The fields of a model's language part, and beneath them those of the whole file.

    `aliases` of the family come before the usual ones, and `defaults` are those of its configuration class: they count
    where the file is silent, and are told in `assumed`.
    """

    def __init__(
        self, config: Config, aliases: Mapping[str, tuple[str, ...]] | None = None, defaults: Config | None = None
    ) -> None:
        self.config = config
        self.model_type = str(config.get("model_type"))
        self.assumed: list[str] = []
        self._aliases = aliases or {}
        self._defaults = defaults or {}
        self._read: set[str] = set()
        self._found: dict[str, Any] = {}

    def names(self, name: str) -> tuple[str, ...]:
        """All names that `name` may have in the file."""
        return self._aliases.get(name) or ALIASES.get(name) or (name,)

    def has(self, name: str) -> bool:
        """Whether the file, or the class of the family, says something other than null."""
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """The value; None where neither the file nor the class has one, or where the file says null."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Any:
        said = [value for path in self.names(name) if (value := self._at(path)) is not _ABSENT]
        if said:
            return next((value for value in said if value is not None), None)
        value = self._defaults.get(name)
        if value is not None:
            self.assume(f"{self.names(name)[0]} {_shown(value)}, the default of {self.model_type} configurations")
        return value

    def assume(self, what: str) -> None:
        """Something that the file does not say and the answer stands on."""
        if what not in self.assumed:
            self.assumed.append(what)

    def whole(self, name: str, least: int = 1) -> int:
        """A whole number of `least` or more. ConfigError with the field's name when there is none."""
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return self._whole(name, value, least)

    def whole_or(self, name: str, default: int, least: int = 0) -> int:
        """A whole number; `default` where neither the file nor the class has one."""
        value = self.get(name)
        return default if value is None else self._whole(name, value, least)

    def flag(self, name: str) -> bool:
        """A yes or no; no where it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false is needed")
        return bool(value)

    def sequence(self, name: str) -> Sequence[Any]:
        """A list. ConfigError when it is something else, or absent."""
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.wrong(name, "a list is needed")
        return value

    def missing(self, name: str) -> ConfigError:
        """To raise: a field is needed and absent."""
        names = " or ".join(dict.fromkeys(self.names(name)))
        return ConfigError(f"the configuration of {self.model_type!r} lacks {names}: a model is not guessed at")

    def wrong(self, name: str, how: str) -> ConfigError:
        """To raise: a field is there and cannot be meant."""
        return ConfigError(f"{self.name_of(name)} is {_shown(self.get(name))} in a {self.model_type!r} model: {how}")

    def name_of(self, name: str) -> str:
        """What the file calls it; the first of its names where it is absent."""
        there = [path for path in self.names(name) if self._at(path) not in (_ABSENT, None)]
        return (there or list(self.names(name)))[0]

    def unread(self) -> Iterator[str]:
        """The fields of the file that nothing asked for and that say something."""
        for name, value in self.config.items():
            if name not in self._read and value is not None and value is not False:
                yield name

    def _at(self, path: str) -> Any:
        value: Any = self.config
        self._read.add(path.partition(".")[0])
        for part in path.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        return value

    def _whole(self, name: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST or value % 1:
            raise self.wrong(name, f"a whole number of {least} or more is needed")
        return int(value)


def language_part(config: Config) -> Config:
    """The fields of the language model: nested ones where the file has parts, else the file itself.

    What is not repeated in the part (a dtype, tied embeddings, quantisation) is taken from the whole.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"a configuration is {type(config).__name__} here: an object with fields is needed")
    for name in NESTED:
        part = config.get(name)
        if isinstance(part, Mapping):
            whole = {key: config[key] for key in _OF_THE_WHOLE if key in config}
            return language_part({**whole, "model_type": config.get("model_type"), **part})
    return config


_OF_THE_WHOLE = (
    *("torch_dtype", "dtype", "tie_word_embeddings", "quantization_config", "compression_config"),
    *("expert_dtype", "vision_config", "audio_config"),
)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
