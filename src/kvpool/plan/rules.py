"""How blocks, tokens and concurrency are counted: kvpool's own two ways, and vLLM's from release to release.

What vLLM counts changed often, and with it the figures of its two start-up lines. Every change is a step in a table
here, with the release that it came in; a rule is the value of all tables at one release. Sources: the releases' own
planning code (`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`, `platforms/`), 0.11.0 to 0.33.0.

Knows nothing of: models, memory, layouts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvpool.errors import ConfigError

Version: TypeAlias = tuple[int, int, int]

FIRST, LAST = (0, 11, 0), (0, 33, 0)
"""The releases whose code the tables were read from."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way of counting. The first three are kvpool's too; the rest says how vLLM lays out and counts.

    `counts`: what a request is charged: "blocks" it holds at most at any time; "steady", the bytes of its content at
    that length, whole blocks or not; or "vllm". `in_words` is for people.
    """

    name: str
    counts: str
    in_words: str
    versions: str = ""
    """The releases of which all that is said here holds."""
    tokens: str = "length"
    """Tokens are concurrency times length ("length"), or blocks through groups times the smallest block ("groups")."""
    sums_bytes: bool = False
    """A request's blocks are its bytes in all groups through the first group's page, not a sum of blocks."""
    most_uneven: float = 1.5
    """Groups have the layers of the commonest kind while these are fewer than so many times those of the rarest."""
    in_flight_steps: int = 1
    """Steps of `max_num_batched_tokens` that windows keep room for."""
    chunked_is_full: bool = False
    caches_states: bool = False
    """Whether models with states have prefix caching unless told otherwise."""
    encoder_is_batch: bool = False
    """Cross attention is charged for `max_num_batched_tokens` tokens, whatever the encoder has."""
    latent_block_size: Mapping[str, int] | None = None
    """By architecture of the device; None: as all layers."""
    index_block_size: int | None = None
    capacity: str = "groups"
    """What must hold one request: the pages of its layers ("layers"), the first group's blocks alone ("first"), or the
    blocks of all groups."""
    subtracts_null_block: bool = True
    """From that."""
    pads_pages: bool = True
    """Pages of attention that cannot be made equal otherwise are padded; else there is no layout."""
    state_step_of_latents: int = 16
    """The block size of latents that a state raises is a multiple of this."""
    projects_stages: bool = True
    """A pipeline stage of one group of unequal pages has its own layers' pages; else all layers'."""
    packing: str = "groups"
    """Of compressed caches: "tuples" of pages, "slots" of each page, or "groups"."""
    shares_index: bool = True
    """Layers that read another layer's index keep none."""
    batch_limits: Sequence[tuple[int, int, int]] = ((70, 8192, 1024), (0, 2048, 256))
    """Of a server: from how many GiB of a device on, the most tokens and the most requests of a step."""

    def limits(self, device_gib: float, *, is_a100: bool = False) -> tuple[int, int]:
        """The most tokens and the most requests of a step, unless told otherwise. An A100 counts as small."""
        fitting = [row for row in self.batch_limits if row[0] <= device_gib and not (is_a100 and row[0] == 70)]
        return fitting[0][1], fitting[0][2]


BLOCKS = Rule("blocks", "blocks", "whole blocks, as many as a request holds at most while it is computed")
STEADY = Rule("steady", "steady", "bytes of what a request keeps at that length, whole blocks or not: a lower bound")

Steps: TypeAlias = Sequence[tuple[Version, Any]]

_MLA_OLD = {"blackwell": 128, "cdna": 16, "ampere": 16, "ada": 16}
_MLA_NEW = {"hopper": 16, "blackwell": 32, "cdna": 16, "ampere": 16, "ada": 16}
CHANGES: Mapping[str, Steps] = {
    "tokens": [((0, 11, 0), "groups"), ((0, 20, 1), "length")],
    "sums_bytes": [((0, 11, 0), True), ((0, 27, 0), False)],
    "most_uneven": [((0, 11, 0), 1.0), ((0, 12, 0), 1.25), ((0, 18, 0), 1.5)],
    "in_flight_steps": [((0, 11, 0), 1), ((0, 26, 0), 2)],
    "chunked_is_full": [((0, 11, 0), True), ((0, 14, 0), False)],
    "caches_states": [((0, 11, 0), False), ((0, 26, 0), True)],
    "encoder_is_batch": [((0, 11, 0), False), ((0, 13, 0), True)],
    "latent_block_size": [
        ((0, 11, 0), {"hopper": 64, **_MLA_OLD}),
        ((0, 16, 0), {"hopper": 64, **_MLA_OLD, "blackwell": 64}),
        ((0, 18, 0), _MLA_NEW),
    ],
    "index_block_size": [((0, 11, 0), 64)],
    "capacity": [((0, 11, 0), "layers"), ((0, 14, 0), "first"), ((0, 19, 0), "groups")],
    "subtracts_null_block": [((0, 11, 0), False), ((0, 29, 0), True)],
    "pads_pages": [((0, 11, 0), False), ((0, 24, 0), True)],
    "state_step_of_latents": [((0, 11, 0), 16), ((0, 11, 2), 64), ((0, 20, 0), 16), ((0, 27, 0), 128)],
    "projects_stages": [((0, 11, 0), False), ((0, 17, 0), True)],
    "packing": [((0, 11, 0), "none"), ((0, 20, 0), "tuples"), ((0, 23, 0), "slots"), ((0, 27, 0), "groups")],
    "shares_index": [((0, 11, 0), False), ((0, 24, 0), True)],
    "batch_limits": [
        ((0, 11, 0), ((70, 8192, 1024), (0, 2048, 256))),
        ((0, 28, 0), ((160, 16384, 1024), (70, 8192, 1024), (0, 2048, 256))),
    ],
}
"""What changed, and in which release it became what."""


def rule(text: str) -> Rule:
    """By name: `blocks`, `steady`, `vllm-0.18.0`. Candidates and builds of a release (0.18.0rc1) count as that release.

    ConfigError for others, with what is known.
    """
    for own in (BLOCKS, STEADY):
        if text == own.name:
            return own
    match = re.fullmatch(r"vllm-v?(\d+)\.(\d+)(?:\.(\d+))?(?:[.+-]?[a-z].*)?", text)
    if match is None:
        raise ConfigError(f"rule {text!r} is not known: blocks, steady, or vllm-VERSION such as vllm-0.18.0")
    major, minor, patch = (int(part or 0) for part in match.groups())
    return vllm_rule((major, minor, patch))


def vllm_rule(version: Version) -> Rule:
    """vLLM's way in one release. ConfigError outside the releases that the tables were read from."""
    if not FIRST <= version < (LAST[0], LAST[1] + 1, 0):
        nearest = FIRST if version < FIRST else LAST
        raise ConfigError(
            f"how vLLM {_dotted(version)} counts is not known: from {_dotted(FIRST)} to {_dotted(LAST)} it is, "
            f"and the nearest is vllm-{_dotted(nearest)}"
        )
    values = {name: _value(steps, version) for name, steps in CHANGES.items()}
    return Rule(f"vllm-{_dotted(version)}", "vllm", "as vLLM counts", _versions(version), **values)


def _value(steps: Steps, version: Version) -> Any:
    return next(value for since, value in reversed(steps) if since <= version)


def _versions(version: Version) -> str:
    """Between the last change before and the next one after."""
    changes = sorted({since for steps in CHANGES.values() for since, _ in steps})
    first = max(since for since in changes if since <= version)
    following = next((since for since in changes if since > version), None)
    return (
        f"{_dotted(first)} to {_dotted(LAST)}"
        if following is None
        else f"{_dotted(first)} to before {_dotted(following)}"
    )


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
