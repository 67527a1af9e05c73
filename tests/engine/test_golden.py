"""The same block at every allocation: serving histories whose figures vLLM's own manager gave."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from kvpool.testing import golden_adapter


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [5, 6])
def test_every_block_is_the_one_that_vllm_chose(shared: Path, seed: int) -> None:
    expected = json.loads((shared / "golden" / "golden.json").read_text())[f"full/seed{seed}"]
    adapter = golden_adapter(num_blocks=expected["pool"])
    figures = _load(shared / "golden" / "mixed_trace.py").run(adapter, seed, expected["n_req"])
    assert figures == {name: expected[name] for name in ("steps", "preemptions", "hit_rate", "block_id_checksum")}
    adapter.cache.check()
    assert adapter.cache.num_free_blocks == adapter.cache.num_usable_blocks
