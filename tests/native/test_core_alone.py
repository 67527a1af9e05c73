"""The C++ core without Python: built with sanitizers and run; and that other processors can compile it."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CORE = FOLDER.parents[1] / "src" / "kvpool" / "_native"
SOURCES = sorted(map(str, FOLDER.glob("*.cpp")))
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-Werror", f"-I{CORE}", f"-I{FOLDER}"]


def compiler(*names: str) -> str:
    """The first of them that there is; skips where there is none."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no C++ compiler: none of {', '.join(names)}")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_core_passes_its_own_tests_under_sanitizers(tmp_path: Path) -> None:
    program = str(tmp_path / "tests")
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]
    run(compiler("g++", "clang++"), *STRICT, *sanitizers, *SOURCES, "-o", program)
    assert "a_published_name" in run(program)


def test_the_core_compiles_for_aarch64(tmp_path: Path) -> None:
    program = str(tmp_path / "tests")
    run(compiler("aarch64-linux-gnu-g++"), *STRICT, "-O2", "-static", *SOURCES, "-o", program)
    emulator = shutil.which("qemu-aarch64")
    if emulator is not None:
        assert "a_published_name" in run(emulator, program)


@pytest.mark.parametrize(
    "header", sorted(path.name for path in CORE.glob("*.hpp") if "Python.h" not in path.read_text())
)
def test_files_of_the_core_are_one_sitting(header: str) -> None:
    assert len((CORE / header).read_text().splitlines()) < 400
