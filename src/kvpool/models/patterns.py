"""Which layer of a model is of which kind: the ways in which configuration files say it.

A pattern answers one word for each layer. The words: `full`, `window`, `chunk` and `state` layers; `cross` for a layer
that looks at an encoder alone, `full+cross` for one that looks at both; `full+state` and `window+state` for layers of
two paths; `none` for one that keeps nothing.

Knows nothing of: what a layer of a kind keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool.errors import ConfigError
from kvpool.models.fields import Fields


class Pattern(Protocol):
    """One way of saying it."""

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        """A word for each layer; None when the file does not say it in this way. ConfigError with the field."""


@dataclass(frozen=True, slots=True)
class Every:
    """All layers are alike."""

    word: str

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:  # noqa: ARG002
        return (self.word,) * num_layers


@dataclass(frozen=True, slots=True)
class Listed:
    """A field with a list, an entry for each layer, or a text with a letter for each."""

    field: str
    meaning: Mapping[Any, str]

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        entries = fields.get(self.field)
        if not entries:
            return None
        if not isinstance(entries, str):
            entries = fields.sequence(self.field)
        unknown = [entry for entry in entries if not _is_key(entry) or entry not in self.meaning]
        if unknown:
            known = ", ".join(map(repr, self.meaning))
            raise ConfigError(
                f"{fields.name_of(self.field)} has {unknown[0]!r}, unknown for {fields.model_type!r} models: "
                f"{known} are known"
            )
        return _require_length(fields, self.field, [self.meaning[entry] for entry in entries], num_layers)


@dataclass(frozen=True, slots=True)
class EveryNth:
    """One layer in n, the last of each n: `word`; the others: `other`. 0 or 1 for n: all are `word`."""

    field: str
    word: str
    other: str

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        if not fields.has(self.field):
            return None
        nth = fields.whole(self.field, least=0) or 1
        return [self.other if index % nth != nth - 1 else self.word for index in range(num_layers)]


@dataclass(frozen=True, slots=True)
class AtOffset:
    """One layer in `period`, at `offset`: `word`; the others: `other`."""

    period: str
    offset: str
    word: str
    other: str

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        period, offset = fields.whole(self.period), fields.whole(self.offset, least=0)
        return [self.word if index % period == offset else self.other for index in range(num_layers)]


@dataclass(frozen=True, slots=True)
class AtIndices:
    """A field with the numbers of the layers that are `word`, counted from `first`; the others: `other`."""

    field: str
    word: str
    other: str
    first: int = 0

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        if fields.get(self.field) is None:
            return None
        listed = fields.sequence(self.field)
        allowed = range(self.first, num_layers + self.first)
        if not all(type(index) is int and index in allowed for index in listed):
            raise fields.wrong(self.field, f"layers are numbered {self.first} to {allowed[-1]}")
        indices = set(listed)
        return [self.word if index in indices else self.other for index in allowed]


@dataclass(frozen=True, slots=True)
class FromOn:
    """Layers from the number in the field on: `word`; those before, and all where windows are not in use: `other`."""

    field: str
    word: str
    other: str

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        if fields.get("sliding_window") is None or not fields.flag("use_sliding_window"):
            return [self.other] * num_layers
        first = fields.whole_or(self.field, num_layers)
        return [self.other if index < first else self.word for index in range(num_layers)]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A field with a short list that is repeated: `("recurrent", "recurrent", "attention")`."""

    field: str
    meaning: Mapping[Any, str]

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        value = fields.get(self.field)
        if not value or isinstance(value, int):
            return None
        entries = list(value if isinstance(value, str) else fields.sequence(self.field))
        return Listed(self.field, self.meaning).words(
            Fields({**fields.config, self.field: [entries[index % len(entries)] for index in range(num_layers)]}),
            num_layers,
        )


@dataclass(frozen=True, slots=True)
class FirstOf:
    """The first of several ways in which the file says it. ConfigError, with the names, when it does not."""

    patterns: tuple[Pattern, ...]

    def words(self, fields: Fields, num_layers: int) -> Sequence[str] | None:
        found = (pattern.words(fields, num_layers) for pattern in self.patterns)
        return next((words for words in found if words is not None), None)


def words_of(pattern: Pattern, fields: Fields, num_layers: int) -> Sequence[str]:
    """A word for each layer. ConfigError when the file does not say it."""
    words = pattern.words(fields, num_layers)
    if words is None:
        raise fields.missing(" or ".join(fields_of(pattern)))
    return words


def num_listed(pattern: Pattern, fields: Fields) -> int | None:
    """How many layers a list has, where the file gives no count but a list."""
    for name in fields_of(pattern):
        entries = fields.get(name)
        if isinstance(entries, str) or (isinstance(entries, Sequence) and entries):
            return len(entries)
    return None


def fields_of(pattern: Pattern) -> list[str]:
    """The fields by which it tells kinds apart; of one in an object, the object."""
    match pattern:
        case FirstOf():
            return [name for inner in pattern.patterns for name in fields_of(inner)]
        case AtOffset():
            return [pattern.period, pattern.offset]
        case Every():
            return []
        case _:
            return [pattern.field.partition(".")[0]]  # type: ignore[attr-defined]


def _is_key(entry: object) -> bool:
    return isinstance(entry, str | int) and not isinstance(entry, bool)


def _require_length(fields: Fields, name: str, words: Sequence[str], num_layers: int) -> Sequence[str]:
    """Longer lists are cut: they may describe draft layers too."""
    if len(words) < num_layers:
        raise fields.wrong(name, f"{len(words)} entries for {num_layers} layers")
    return words[:num_layers]
