"""Overhead: measured splits, laws for random shapes, and 203 real start-ups with each model left out in turn."""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.plan.devices import device
from kvpool.plan.overhead import (
    LEARNT,
    RELEASES,
    Boot,
    Coefficients,
    EngineSettings,
    ModelShape,
    Overhead,
    activation_bytes,
    learn,
    overhead,
)

GIB = 2**30
MIB = 2**20
LLAMA_8B = ModelShape(4096, 14336, 128256, 32)

SHAPES = {
    "Llama-3.3-70B": ModelShape(8192, 28672, 128256, 80),
    "Llama-4-Maverick": ModelShape(5120, 8192, 202048, 48, 1),
    "Qwen3-235B": ModelShape(4096, 1536, 151936, 94, 8),
    "Qwen3-VL-30B": ModelShape(2048, 768, 151936, 48, 8),
    "Qwen3-Coder-Next": ModelShape(2048, 512, 151936, 48, 10),
    "Qwen3.5-35B": ModelShape(2048, 512, 248320, 40, 8),
    "DeepSeek-R1": ModelShape(7168, 2048, 129280, 61, 8),
    "DeepSeek-V3.2": ModelShape(7168, 2048, 129280, 61, 8),
    "Kimi-K2.5": ModelShape(7168, 2048, 163840, 61, 8),
    "Nemotron-3-Nano": ModelShape(2688, 1856, 131072, 52, 6),
}
"""By a part of the name in the records."""

ONE_MODEL = {"DeepSeek-V3.2": "DeepSeek-R1"}
"""As wide as each other, so to leave one out is to leave out both."""


# -- what was measured apart


@pytest.mark.parametrize(
    ("shape", "tp", "version", "gib"),
    [
        pytest.param(LLAMA_8B, 1, "0.11.0", 4.76, id="Llama-3.1-8B"),
        pytest.param(SHAPES["Llama-3.3-70B"], 2, "0.11.0", 4.84, id="Llama-3.3-70B"),
        pytest.param(ModelShape(1024, 3072, 151936, 28), 1, "0.11.0", 5.56, id="Qwen3-0.6B"),
        pytest.param(ModelShape(5120, 25600, 151936, 64), 1, "0.11.0", 5.64, id="Qwen3-32B"),
        pytest.param(ModelShape(5120, 17408, 151936, 40), 1, "0.16.0", 5.64, id="Qwen3-14B"),
        pytest.param(ModelShape(2880, 2880, 201088, 24, 4), 1, "0.11.0", 7.38, id="gpt-oss-20b"),
        pytest.param(ModelShape(5120, 17408, 151936, 40), 1, "0.17.0", 2.23, id="Qwen3-14B, no sort"),
        pytest.param(LLAMA_8B, 1, "0.19.0", 1.89, id="Llama-3.1-8B, no sort"),
        pytest.param(LLAMA_8B, 4, "0.19.0", 1.89, id="Llama-3.1-8B, no sort, TP4"),
        pytest.param(ModelShape(4096, 12288, 151936, 36), 1, "0.19.0", 2.21, id="Qwen3-8B"),
        pytest.param(ModelShape(3584, 18944, 152064, 28), 1, "0.19.0", 2.21, id="Qwen2.5-7B"),
        pytest.param(ModelShape(5120, 17920, 100352, 40), 1, "0.19.0", 1.52, id="phi-4"),
        pytest.param(ModelShape(2304, 9216, 256000, 26), 1, "0.19.0", 3.62, id="gemma-2-2b"),
        pytest.param(ModelShape(4096, 11008, 32016, 32), 1, "0.19.0", 0.77, id="CodeLlama-7b: the forward stage"),
        pytest.param(ModelShape(4096, 12800, 49155, 40), 1, "0.19.0", 0.85, id="granite-3.1-8b: the forward stage"),
        pytest.param(ModelShape(2048, 768, 151936, 48, 8), 1, "0.19.0", 2.68, id="Qwen3-30B-A3B: kept workspace"),
        pytest.param(ModelShape(2048, 1408, 151936, 24, 4), 1, "0.19.0", 2.47, id="Qwen1.5-MoE: kept workspace"),
        pytest.param(ModelShape(2048, 1408, 102400, 27, 6), 1, "0.19.0", 1.93, id="DeepSeek-V2-Lite: kept workspace"),
    ],
)
def test_peaks_in_debug_logs_on_h100(shape: ModelShape, tp: int, version: str, gib: float) -> None:
    """8,192 tokens and 1,024 requests: llm-d-planner's accuracy report and its empirical results."""
    assert activation_bytes(shape, EngineSettings(tp=tp, version=version)) / GIB == pytest.approx(gib, rel=0.04)


@pytest.mark.parametrize(
    ("shape", "tp", "version", "utilisation", "weights_gib", "available_gib"),
    [
        pytest.param(ModelShape(2880, 2880, 201088, 24, 4), 1, "0.11.0", 0.9, 13.47, 50.28, id="gpt-oss-20b"),
        pytest.param(SHAPES["Llama-3.3-70B"], 2, "0.11.0", 0.9, 33.88, 32.00, id="Llama-3.3-70B FP8, TP2"),
        pytest.param(LLAMA_8B, 1, "0.11.0", 0.9, 14.99, 51.38, id="Llama-3.1-8B"),
        pytest.param(ModelShape(1024, 3072, 151936, 28), 1, "0.11.0", 0.9, 1.12, 64.45, id="Qwen3-0.6B"),
        pytest.param(LLAMA_8B, 1, "0.19.0", 0.95, 14.99, 58.11, id="Llama-3.1-8B, no sort"),
        pytest.param(ModelShape(3584, 18944, 152064, 28), 1, "0.19.0", 0.95, 14.25, 58.53, id="Qwen2.5-7B, no sort"),
    ],
)
def test_start_ups_on_h100_that_no_cell_was_learnt_from(
    shape: ModelShape, tp: int, version: str, utilisation: float, weights_gib: float, available_gib: float
) -> None:
    found = overhead(shape, EngineSettings(tp=tp, version=version))
    predicted = utilisation * device("H100").total_gib - weights_gib - found.counted_bytes / GIB
    assert predicted == pytest.approx(available_gib, abs=0.25)


def test_the_sampling_stage_by_hand() -> None:
    """256 x 128,256 x 14.7 + 2,048 x 2 x 1.25 x 4,096; the forward stage is 2,048 x 2 x (4.25 x 4,096 + 3 x 14,336)."""
    settings = EngineSettings(max_num_batched_tokens=2048, max_num_seqs=256, version="0.19")
    assert activation_bytes(LLAMA_8B, settings) == round(256 * 128256 * 14.7) + 2048 * 2 * 5120
    few = replace(settings, max_num_seqs=8)
    assert activation_bytes(LLAMA_8B, few) == 2048 * 2 * (17408 + 43008)


def test_graphs_are_counted_from_0_20_on_and_eager_has_none() -> None:
    older, newer = EngineSettings(version="v0.19.0"), EngineSettings(version="v0.20.2+cu129")
    before, after = overhead(LLAMA_8B, older), overhead(LLAMA_8B, newer)
    assert before.graph_bytes == after.graph_bytes > 0
    assert (before.counts_graphs, after.counts_graphs) == (False, True)
    assert before.counted_bytes == before.activation_bytes + before.outside_bytes < before.total_bytes
    assert after.counted_bytes == after.total_bytes
    assert overhead(LLAMA_8B, replace(newer, eager=True)).graph_bytes == 0


# -- laws

shapes = st.builds(
    ModelShape,
    hidden_size=st.integers(1, 20_000),
    intermediate_size=st.integers(1, 60_000),
    vocab_size=st.integers(1, 300_000),
    num_layers=st.integers(1, 200),
    num_experts_per_tok=st.integers(0, 16),
)
settings_of_engines = st.builds(
    EngineSettings,
    tp=st.integers(1, 64),
    max_num_batched_tokens=st.integers(1, 200_000),
    max_num_seqs=st.integers(1, 5_000),
    element_bytes=st.sampled_from([1, 2, 4]),
    device_kind=st.sampled_from(["nvidia", "amd"]),
    version=st.sampled_from(["0.5", "0.11.0", "v0.13.1", "0.14.1", "0.16.0", "0.18.0", "0.20.2", "1.2.0"]),
    expert_parallel=st.booleans(),
    eager=st.booleans(),
)


@given(shapes, settings_of_engines)
def test_nothing_is_negative(shape: ModelShape, settings: EngineSettings) -> None:
    found = overhead(shape, settings)
    assert found.activation_bytes > 0
    assert min(found.outside_bytes, found.graph_bytes) >= 0
    assert found.total_bytes >= found.counted_bytes >= found.activation_bytes


@given(shapes, settings_of_engines, st.integers(1, 10_000))
def test_more_batched_tokens_take_more(shape: ModelShape, settings: EngineSettings, more: int) -> None:
    larger = replace(settings, max_num_batched_tokens=settings.max_num_batched_tokens + more)
    assert activation_bytes(shape, larger) > activation_bytes(shape, settings)
    assert overhead(shape, larger).outside_bytes == overhead(shape, settings).outside_bytes


@given(shapes, settings_of_engines, st.integers(1, 1_000))
def test_more_requests_and_fewer_ranks_never_take_less(shape: ModelShape, settings: EngineSettings, more: int) -> None:
    assert activation_bytes(shape, replace(settings, max_num_seqs=settings.max_num_seqs + more)) >= activation_bytes(
        shape, settings
    )
    assert activation_bytes(shape, replace(settings, tp=1)) >= activation_bytes(shape, settings)


@given(
    st.lists(
        st.builds(
            Boot,
            model=st.sampled_from("abc"),
            shape=shapes,
            settings=settings_of_engines,
            overhead_bytes=st.integers(-GIB, 20 * GIB),
            graph_bytes=st.integers(-GIB, 9 * GIB),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_is_learnt_from_fills_the_same_cells(boots: list[Boot]) -> None:
    learnt = learn(boots)
    assert cells_of(learnt) == cells_of(LEARNT)
    assert all(cell.num_bytes >= 0 for cell in (*learnt.outside, *learnt.graph_a_layer))
    assert learn(list(reversed(boots))) == learnt


def test_a_boot_is_explained_by_what_is_learnt_from_it_alone() -> None:
    settings = EngineSettings(version="0.20.0")
    boot = Boot("a", LLAMA_8B, settings, overhead_bytes=5 * GIB, graph_bytes=GIB)
    found = overhead(LLAMA_8B, settings, learn([boot]))
    assert (found.counted_bytes, found.graph_bytes) == (5 * GIB, GIB)


def test_each_model_has_one_vote() -> None:
    """Nine boots of one model and one of each of two others: the middle model decides."""
    settings = EngineSettings(version="0.18.0")
    base = activation_bytes(LLAMA_8B, settings)
    boots = [Boot("often", LLAMA_8B, settings, base + 9 * GIB, 0)] * 9
    boots += [Boot(name, LLAMA_8B, settings, base + extra * GIB, 0) for name, extra in (("b", 1), ("c", 2))]
    assert overhead(LLAMA_8B, settings, learn(boots)).outside_bytes == 2 * GIB


# -- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 0}, "tp is 0: a whole number of 1 or more"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"element_bytes": 0}, "element_bytes is 0: more than 0"),
        ({"device_kind": "google"}, "device_kind is 'google': start-ups are known of nvidia and amd"),
        ({"version": "latest"}, "version is 'latest': two numbers"),
    ],
)
def test_refused_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        replace(EngineSettings(), **changes)  # type: ignore[arg-type]


def test_refused_shapes_and_nothing_to_learn_from() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 0: a whole number of 1 or more"):
        ModelShape(1, 1, 0, 1)
    with pytest.raises(ConfigError, match="num_experts_per_tok is -1"):
        ModelShape(1, 1, 1, 1, -1)
    with pytest.raises(ConfigError, match="no start-ups to learn from"):
        learn([])


def test_releases_and_cells_are_in_order() -> None:
    """The last that holds counts, so a later row must not be older."""
    assert [release.since for release in RELEASES] == sorted(release.since for release in RELEASES)
    for cells in (LEARNT.outside, LEARNT.graph_a_layer):
        for kind in ("nvidia", "amd"):
            rows = [(cell.since, cell.least_tp) for cell in cells if cell.device_kind == kind]
            assert rows == sorted(rows)
            assert rows[0] == ((0, 0), 1)


# -- real start-ups


@dataclass(frozen=True)
class Record:
    """A start-up, and what it left for the cache."""

    boot: Boot
    available_bytes: float

    def error(self, found: Overhead) -> float:
        """Of the predicted cache, relative to the real one."""
        return abs(found.counted_bytes - self.boot.overhead_bytes) / self.available_bytes


@pytest.fixture(scope="module")
def records(shared: Path) -> list[Record]:
    path = shared / "data" / "sizing" / "vllm_boot_records.csv"
    if not path.is_file():
        pytest.skip(f"no {path.name} in the shared folder")
    with path.open(newline="") as lines:
        return [record_of(row) for row in csv.DictReader(lines)]


def record_of(row: dict[str, str]) -> Record:
    """The column of the utilisation is wrong in a few rows, the other arguments are not."""
    told = re.search(r"gpu-memory-utilization: ([\d.]+)", row["other_args"])
    utilisation = float(told[1] if told else row["gpu_memory_utilization"])
    accelerator = device(row["accelerator"])
    assert accelerator.maker
    available = float(row["available_kv_gib"]) * GIB
    name = next(part for part in SHAPES if part in row["model"])
    settings = EngineSettings(
        tp=int(row["tp"]),
        device_kind=accelerator.maker,
        version=row["vllm_version"],
        expert_parallel="enable-expert-parallel: True" in row["other_args"],
    )
    left = utilisation * accelerator.total_bytes - float(row["model_load_gib"]) * GIB - available
    graph = round(float(row["cudagraph_gib"]) * GIB)
    return Record(Boot(ONE_MODEL.get(name, name), SHAPES[name], settings, round(left), graph), available)


def test_available_memory_with_each_model_left_out(records: list[Record]) -> None:
    """The cache of a model is predicted from start-ups of other models alone.

    Within 2 % for 82 % of the records, 5 % for 99 %, 10 % for all. The median of other models on the same accelerator
    reaches 58, 95 and 98 %. What is worst: builds of 0.11.0 and 0.13.1 whose sampler does not sort.
    """
    boots = [record.boot for record in records]
    without = {model: learn([boot for boot in boots if boot.model != model]) for model in {b.model for b in boots}}
    errors = [
        record.error(overhead(record.boot.shape, record.boot.settings, without[record.boot.model]))
        for record in records
    ]
    assert len(errors) == 203
    assert share(errors, 0.02) >= 0.80
    assert share(errors, 0.05) >= 0.98
    assert share(errors, 0.10) == 1


def test_every_cell_is_learnt_from_others_whichever_model_is_left_out(records: list[Record]) -> None:
    """Otherwise the figures above would rest on a substitute."""
    for model in {record.boot.model for record in records}:
        others = [record.boot.settings for record in records if record.boot.model != model]
        for record in records:
            cells = [cell for cell in LEARNT.outside if cell.holds(record.boot.settings)]
            assert any(cells[-1].holds(settings) for settings in others)


def test_what_is_shipped_is_what_all_records_teach(records: list[Record]) -> None:
    learnt = learn([record.boot for record in records])
    pairs = zip((*learnt.outside, *learnt.graph_a_layer), (*LEARNT.outside, *LEARNT.graph_a_layer), strict=True)
    for found, shipped in pairs:
        assert abs(found.num_bytes - shipped.num_bytes) <= MIB


def cells_of(coefficients: Coefficients) -> list[tuple[object, ...]]:
    cells = (*coefficients.outside, *coefficients.graph_a_layer)
    return [(cell.device_kind, cell.since, cell.least_tp) for cell in cells]


def share(errors: Iterable[float], most: float) -> float:
    within = [error <= most for error in errors]
    return sum(within) / len(within)
