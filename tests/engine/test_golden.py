"""The same block at every allocation: serving histories whose figures vLLM's own manager gave."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from kvpool import FullAttention, LayerKind, SlidingWindow
from kvpool.testing import golden_adapter

LAYOUTS: dict[str, Sequence[LayerKind]] = {
    "full": [FullAttention()],
    "gemma_like_1full_5swa1024": [FullAttention(), *[SlidingWindow(1_024)] * 5],
    "gptoss_like_1full_1swa128": [FullAttention(), SlidingWindow(128)],
}


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trace(shared: Path) -> ModuleType:
    return _load(shared / "golden" / "mixed_trace.py")


@pytest.mark.parametrize(
    ("layout", "seed"),
    [("full", 5), ("full", 6), ("gemma_like_1full_5swa1024", 5), ("gptoss_like_1full_1swa128", 5)],
)
def test_every_block_is_the_one_that_vllm_chose(shared: Path, trace: ModuleType, layout: str, seed: int) -> None:
    expected = json.loads((shared / "golden" / "golden.json").read_text())[f"{layout}/seed{seed}"]
    adapter = golden_adapter(num_blocks=expected["pool"], groups=LAYOUTS[layout])
    figures = trace.run(adapter, seed, expected["n_req"])
    assert figures == {name: expected[name] for name in ("steps", "preemptions", "hit_rate", "block_id_checksum")}
    adapter.cache.check()
    assert adapter.cache.num_free_blocks == adapter.cache.num_usable_blocks


def test_no_history_is_left_out(shared: Path) -> None:
    histories = json.loads((shared / "golden" / "golden.json").read_text())
    assert {name.partition("/")[0] for name in histories} == set(LAYOUTS)
    assert len(histories) == 4


@pytest.mark.parametrize(
    ("num_blocks", "dense", "boundaries"), [(12_000, 0.131, 0.125), (20_000, 0.230, 0.184), (40_000, 0.719, 0.649)]
)
def test_hit_rates_of_dense_and_sparse_publication(
    trace: ModuleType, num_blocks: int, dense: float, boundaries: float
) -> None:
    for publication, hit_rate in (("dense", dense), (0, boundaries)):
        adapter = golden_adapter(
            num_blocks=num_blocks, groups=LAYOUTS["gemma_like_1full_5swa1024"], publication=publication
        )
        assert round(trace.run(adapter, 5)["hit_rate"], 3) == hit_rate
        adapter.cache.check()
