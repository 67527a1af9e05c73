"""The C++ core without Python: built with sanitizers and run; and that other processors can compile it."""

import os
import shutil
import subprocess
import sys
import sysconfig
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


@pytest.mark.deep
def test_the_binding_passes_its_tests_under_sanitizers(tmp_path: Path) -> None:
    """A copy of the package with a sanitized build; the sanitizers must be there before Python is."""
    compiler("g++")
    shutil.copytree(CORE.parent, tmp_path / "kvpool", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    sources = sorted(map(str, CORE.glob("*.cpp")))
    include = f"-I{sysconfig.get_path('include')}"
    flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=undefined", include]
    run("g++", *flags, *sources, "-o", str(tmp_path / "kvpool" / "_native" / "_core.abi3.so"))
    first = [run("g++", f"-print-file-name={library}").strip() for library in ("libasan.so", "libstdc++.so")]
    variables = {"LD_PRELOAD": ":".join(first), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(tmp_path)}
    tests = [str(FOLDER / name) for name in ("test_arguments.py", "test_row_arguments.py")]
    tests += [str(FOLDER.parent / "contract"), str(FOLDER.parent / "unit" / "test_batch_interrupted.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--fuzz-seconds", "10", *tests],
        env={**os.environ, **variables, "KVPOOL_NATIVE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


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
