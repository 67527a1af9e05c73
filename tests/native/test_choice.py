"""Native or pure: chosen by the environment, said once in the log."""

import os
import subprocess
import sys

import pytest

from kvpool import BlockPool, KVCacheManager
from kvpool._native import NativeBlockPool, features
from kvpool.core.chosen import ChosenPool

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


def test_other_wishes_are_refused() -> None:
    assert "KVPOOL_NATIVE is 'yes': 0 for pure Python, 1 to insist" in python(SAY, "yes").stderr


def test_the_cache_uses_what_was_chosen() -> None:
    assert ChosenPool is (NativeBlockPool or BlockPool)
    assert type(KVCacheManager(5)._pool) is ChosenPool
    assert (features()["core"] == "native") == (NativeBlockPool is not None)


@pytest.mark.skipif(NativeBlockPool is None, reason="the native core is not built, or KVPOOL_NATIVE is 0")
def test_without_a_wish_the_native_core_is_taken_where_it_is_built() -> None:
    assert python(SAY + SHOW, None).stdout.startswith("native <class 'kvpool._native.pool.NativeBlockPool'>")
