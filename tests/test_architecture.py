"""The house: every import points down, and the core knows no clock, chance, environment or threads."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "kvpool"

LAYERS = [
    ["types"],
    ["errors"],
    ["limits"],
    ["events"],
    ["stats"],
    ["plan"],
    ["models"],
    ["_native"],
    ["core.hashing"],
    ["core.eviction"],
    ["core.index"],
    ["core.hit"],
    ["core.block_pool"],
    ["core.chosen"],
    ["core.groups"],
    ["core.lookup"],
    ["core.late"],
    ["core.request"],
    ["core.block_table"],
    ["core.room"],
    ["core.publication"],
    ["core.publisher"],
    ["core.admission"],
    ["core.decode_batch"],
    ["core.native_batch"],
    ["core.damage"],
    ["core.gauges"],
    ["core.manager"],
    ["engine"],
    ["runner"],
    ["serving"],
    ["replay"],
    ["client"],
    ["cli"],
    ["testing"],
]
"""A module imports only from layers above its own, and within a folder that is one layer, without a cycle."""

FACADES = {"", "plan", "models", "core", "engine", "runner", "serving", "replay", "client", "cli", "testing"}
"""Packages' own `__init__` modules: the public names, and a sentence for each folder."""

IMPURE = {"time", "datetime", "random", "secrets", "uuid", "os", "threading", "multiprocessing", "asyncio", "socket"}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def module_name(path: Path) -> str:
    """`core.hashing` for core/hashing.py; the folder's name for its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")])}


def layer(module: str) -> int:
    """The place of a module in the order of imports."""
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return index
    raise AssertionError(f"{module} has no place in LAYERS: give it one")


def imported(node: ast.AST) -> Iterator[str]:
    """The full names that an import statement brings in; `from a import b` may mean the module a.b."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.ImportFrom():
            raise AssertionError(f"a relative import in line {node.lineno}: write the full name")


def own_imports(tree: ast.AST) -> Iterator[str]:
    """The modules of kvpool that a piece of code imports, wherever the statement stands."""
    for node in ast.walk(tree):
        for name in imported(node):
            if name == "kvpool" or name.startswith("kvpool."):
                yield _as_module(name.removeprefix("kvpool").removeprefix("."))


def _as_module(name: str) -> str:
    return name if name in MODULES else name.rpartition(".")[0]


def top_level_imports(tree: ast.Module) -> set[str]:
    """What is imported where a reader looks; a `try` there, which tells of a missing extra, hides nothing."""
    tried = [node.body for node in tree.body if isinstance(node, ast.Try)]
    statements = itertools.chain(tree.body, *tried)
    return set(itertools.chain.from_iterable(own_imports(node) for node in statements if _is_import(node)))


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def wrong_arrows(imports: dict[str, set[str]]) -> list[str]:
    """Imports that point up, or into a module that no folder may be entered by."""
    return [
        f"{module} -> {target or 'kvpool'}"
        for module, targets in imports.items()
        if module not in FACADES
        for target in targets
        if target in FACADES or layer(target) > layer(module)
    ]


def cycle(imports: dict[str, set[str]]) -> list[str] | None:
    """A round of imports, if there is one."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        found = next(filter(None, (visit(target, [*path, module]) for target in sorted(imports.get(module, ())))), None)
        done.add(module)
        return found

    return next(filter(None, (visit(module, []) for module in imports)), None)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


TREES = {module: tree_of(path) for module, path in MODULES.items()}
IMPORTS = {module: set(own_imports(tree)) for module, tree in TREES.items()}


def test_every_import_points_down() -> None:
    assert wrong_arrows(IMPORTS) == []


def test_there_is_no_cycle() -> None:
    assert cycle({module: targets - FACADES for module, targets in IMPORTS.items()}) is None


def test_only_the_public_face_imports_for_others() -> None:
    """A folder's `__init__` has a sentence and nothing else, but for two: the core's public names, and `testing`'s."""
    assert {folder: IMPORTS[folder] for folder in FACADES - {"", "testing"} if IMPORTS.get(folder)} == {}
    assert {target for target in IMPORTS[""] if layer(target) >= layer("engine")} == set()


@pytest.mark.parametrize("module", MODULES)
def test_our_own_modules_are_imported_at_the_top(module: str) -> None:
    """Neither inside functions nor for typing only: an import that has to hide is an arrow the wrong way."""
    assert IMPORTS[module] == top_level_imports(TREES[module])
    assert "TYPE_CHECKING" not in MODULES[module].read_text()


@pytest.mark.parametrize("module", [module for module in MODULES if module.split(".")[0] == "core"])
def test_the_core_is_a_pure_state_machine(module: str) -> None:
    names = {name.split(".")[0] for node in ast.walk(TREES[module]) for name in imported(node)}
    assert names & IMPURE == set()
    assert [word for word in ("environ", "np.random") if word in MODULES[module].read_text()] == []


def test_no_module_is_named_after_nothing() -> None:
    assert {module for module in MODULES if module.split(".")[-1] in BANNED_NAMES} == set()


def test_folders_are_two_levels_at_most_and_say_what_they_are() -> None:
    assert [module for module in MODULES if module.count(".") > 1] == []
    assert [module for module, tree in TREES.items() if not ast.get_docstring(tree)] == []


# -- the rules above can fail


def test_an_arrow_up_is_found() -> None:
    assert wrong_arrows({"core.hashing": {"core.manager"}, "core.manager": {"core.hashing"}}) == [
        "core.hashing -> core.manager"
    ]
    assert wrong_arrows({"core.manager": {"engine.scheduler"}}) == ["core.manager -> engine.scheduler"]
    assert wrong_arrows({"engine.engine": {"replay.readers", "core.manager"}}) == ["engine.engine -> replay.readers"]
    assert wrong_arrows({"core.hit": {""}}) == ["core.hit -> kvpool"]


def test_a_round_is_found() -> None:
    assert cycle({"engine.a": {"engine.b"}, "engine.b": {"engine.c"}, "engine.c": {"engine.b"}}) == [
        "engine.b",
        "engine.c",
        "engine.b",
    ]
    assert cycle({"engine.a": {"engine.b", "engine.c"}, "engine.b": {"engine.c"}, "engine.c": set()}) is None


def test_a_hidden_import_is_found() -> None:
    tree = ast.parse("import json\ndef f():\n    from kvpool.core import manager\n    import kvpool.errors\n")
    assert set(own_imports(tree)) == {"core.manager", "errors"}
    assert top_level_imports(tree) == set()


def test_an_unknown_module_is_found() -> None:
    with pytest.raises(AssertionError, match=r"core\.helpers has no place in LAYERS"):
        layer("core.helpers")
