"""`kvpool doctor`: what is installed here, and whether the native core says what Python says.

Needs the core alone: it is the one to ask when something else is missing.
"""

import argparse
import platform
import re
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, requires, version
from random import Random

from kvpool._native import WHY_PURE, features
from kvpool.core.block_pool import BlockPool
from kvpool.core.chosen import ChosenPool
from kvpool.core.hashing import BlockHasher, cbor
from kvpool.errors import KVPoolError

_FAULTY = 1
_NUM_BLOCKS = 256
_EXTRA = re.compile(r"extra\s*==\s*[\"']([^\"']+)")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_FOR_DEVELOPERS = {"test"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of it."""
    parser.description = "What is installed here, and whether it is sound."
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    fault = _fault()
    here = features()
    rows = [
        ("kvpool", f"{version('kvpool')} on {platform.python_implementation()} {platform.python_version()}, "
                   f"{platform.system()} {platform.machine()}"),
        ("core", here["core"] + (f": {WHY_PURE}" if WHY_PURE else "")),
        ("SHA-256", here["sha256"]),
        ("numpy", version("numpy")),
        *((extra, _state(extra, libraries)) for extra, libraries in _extras().items()),
        ("self-check", fault or f"{_NUM_BLOCKS} blocks named, found and evicted as they should be"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        print(f"{name:{width}}{value}")
    return _FAULTY if fault else 0


def _extras() -> dict[str, list[str]]:
    """The libraries of each extra, without those that it takes from another one."""
    extras: dict[str, list[str]] = {}
    for requirement in requires("kvpool") or ():
        extra, library = _EXTRA.search(requirement), _NAME.match(requirement)
        if extra and library and extra[1] not in _FOR_DEVELOPERS:
            extras.setdefault(extra[1], []).extend({library[0]} - {"kvpool"})
    return extras


def _state(extra: str, libraries: list[str]) -> str:
    """The versions of an extra's libraries; what to install where one is missing."""
    found = {library: _version(library) for library in libraries}
    told = ", ".join(f"{library} {found[library] or 'is not installed'}" for library in libraries)
    return told if all(found.values()) else f"{told}: pip install 'kvpool[{extra}]'"


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _fault() -> str | None:
    """What the core in use does otherwise than Python's own hashlib and the Python pool; None: nothing."""
    rng = Random(0)
    hasher = BlockHasher(16)
    tokens = [
        rng.choice((rng.randrange(24), rng.randrange(1 << 16), rng.randrange(1 << 32))) for _ in range(_NUM_BLOCKS * 16)
    ]
    names = hasher.names(tokens)
    parent = hasher.root
    for place, name in enumerate(names):
        block = tuple(tokens[place * 16 : place * 16 + 16])
        parent = sha256(b"\x83" + cbor(parent) + cbor(block) + b"\xf6").digest()
        if name != parent:
            return f"FAULTY: block {place} is named {name.hex()}, and hashlib says {parent.hex()}"
    return _pool_fault(names)


def _pool_fault(names: list[bytes]) -> str | None:
    """What the pool in use answers otherwise than the Python pool while it is filled twice over; None: nothing."""
    pools = [kind(_NUM_BLOCKS // 2) for kind in (ChosenPool, BlockPool)]
    try:
        for start in range(0, len(names), 16):
            found = []
            for pool in pools:
                blocks = pool.allocate(16) or []
                pool.commit(blocks, names[start : start + 16])
                pool.free(reversed(blocks))
                found.append((blocks, pool.match(names), pool.match(names[start:])))
            if found[0] != found[1]:
                return f"FAULTY: the pool answers {found[0]}, and should {found[1]}"
        for pool in pools:
            pool.check()
    except (KVPoolError, AssertionError) as error:
        return f"FAULTY: {error}"
    return None
