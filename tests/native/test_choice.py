"""Native or pure: chosen by the environment, said once in the log."""

import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from kvpool import BlockPool, KVCacheManager
from kvpool._native import NativeBlockPool, features
from kvpool.core.chosen import ChosenPool

ROOT = Path(__file__).parents[2]
WITHOUT_CORE = "import sys; sys.modules['kvpool._native._core'] = None; "
SAY = "import logging; logging.basicConfig(level=logging.DEBUG, format='%(message)s'); import kvpool._native as n; "
SHOW = "print(n.features()['core'], n.NativeBlockPool, n.hash_blocks)"


def python(program: str, wish: str | None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "KVPOOL_NATIVE"}
    if wish is not None:
        environment["KVPOOL_NATIVE"] = wish
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_0_chooses_the_pure_core() -> None:
    done = python(SAY + SHOW, "0")
    assert done.stdout == "pure None None\n"
    assert done.stderr.count("pure Python: KVPOOL_NATIVE is 0") == 1


def test_without_the_compiled_part_everything_is_pure() -> None:
    done = python(WITHOUT_CORE + SAY + SHOW, None)
    assert done.stdout == "pure None None\n"
    assert done.stderr.count("pure Python: the native core is not built") == 1


def test_1_insists() -> None:
    done = python(WITHOUT_CORE + SAY, "1")
    assert done.returncode == 1
    assert "KVPOOL_NATIVE is 1, and the native core cannot be imported" in done.stderr
    assert "install a C++ compiler" in done.stderr


@pytest.mark.skipif(NativeBlockPool is None, reason="the native core is not built, or KVPOOL_NATIVE is 0")
def test_a_core_of_other_sources_is_not_taken() -> None:
    other = "import sys, types; m = types.ModuleType('m'); m.digest = lambda _: 'other'; "
    program = other + "sys.modules['kvpool._native.sources'] = m; " + SAY + SHOW
    done = python(program, None)
    assert done.stdout == "pure None None\n"
    assert "it was built from other sources than those beside it" in done.stderr
    assert "KVPOOL_NATIVE is 1, and the native core cannot be imported (it was built" in python(program, "1").stderr


def test_what_an_earlier_build_left_is_gone_when_a_build_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **words: told.update(words))
    monkeypatch.chdir(tmp_path)
    source = Path("src/kvpool/_native")
    source.mkdir(parents=True)
    (source / "sources.py").write_bytes((ROOT / source / "sources.py").read_bytes())
    (source / "wrong.cpp").write_text("#error wrong")
    run_path(str(ROOT / "setup.py"))
    for inplace in (False, True):
        build = told["cmdclass"]["build_ext"](setuptools.Distribution({"ext_modules": told["ext_modules"]}))
        build.build_lib, build.build_temp, build.inplace = "build", "build/temp", inplace
        build.ensure_finalized()
        left = [Path("build", build.get_ext_filename("kvpool._native._core")), Path(source, "_core.abi3.so")]
        for path in left:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("stale")
        build.run()
        assert [path.exists() for path in left] == [False, not inplace]


def test_other_wishes_are_refused() -> None:
    assert "KVPOOL_NATIVE is 'yes': 0 for pure Python, 1 to insist" in python(SAY, "yes").stderr


def test_the_cache_uses_what_was_chosen() -> None:
    assert ChosenPool is (NativeBlockPool or BlockPool)
    assert type(KVCacheManager(5)._pool) is ChosenPool
    assert (features()["core"] == "native") == (NativeBlockPool is not None)


@pytest.mark.skipif(NativeBlockPool is None, reason="the native core is not built, or KVPOOL_NATIVE is 0")
def test_without_a_wish_the_native_core_is_taken_where_it_is_built() -> None:
    assert python(SAY + SHOW, None).stdout.startswith("native <class 'kvpool._native.pool.NativeBlockPool'>")
