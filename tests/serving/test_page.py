"""docs/serving.md names what there is: the flags, the paths, the codes of errors, the figures."""

import argparse
import re
from pathlib import Path
from typing import Any, cast

import httpx
from tests.serving.served import running

from kvpool.cli import serve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()


def named(title: str, pattern: str) -> set[str]:
    """What the first columns of a section's table name."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [
        line.split("|")[1 : 3 if title == "Errors" else 2] for line in section.splitlines() if line.startswith("| ")
    ]
    return {name for row in cells for cell in row for name in re.findall(pattern, cell)}


def test_its_flags() -> None:
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    flags = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    assert named("Flags", r"`(--[\w-]+)`") == flags


def test_its_paths_and_figures() -> None:
    with running() as served:
        app = cast(Any, served.server.config.app)
        told = httpx.get(f"{served.url}/metrics", timeout=60).text
    assert named("Endpoints", r"`(/[\w/]+)`") == {route.path.partition("/{")[0] for route in app.routes}
    figures = set(re.findall(r"^# TYPE (kvpool_\w+) (?!gauge$)|^# TYPE (\w+) gauge$", told, flags=re.MULTILINE))
    kept = {name for pair in figures for name in pair if name and not name.endswith("_created")}
    assert named("Figures", r"`(kvpool_\w+)`") == kept


def test_its_errors() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src" / "kvpool" / "serving").glob("*.py"))
    assert named("Errors", r"`(\w+)`") == set(re.findall(r"\bcode=\"(\w+)\"", source))
