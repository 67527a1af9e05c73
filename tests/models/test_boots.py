"""203 real starts of vLLM: what it said it had room for, and what the plan says, given the memory."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tests.models.configs import model

from kvpool.plan.deployment import Deployment
from kvpool.plan.devices import device
from kvpool.plan.memory import GIB, Plan, plan_memory
from kvpool.plan.rules import rule

CONFIGS = {
    "DeepSeek-R1": "deepseek-ai__DeepSeek-R1",
    "DeepSeek-V3.2": "deepseek-ai__DeepSeek-V3.2",
    "Kimi-K2.5": "moonshotai__Kimi-K2.5",
    "Llama-3.3-70B": "meta-llama__Llama-3.1-70B-Instruct",
    "Llama-4-Maverick": "meta-llama__Llama-4-Scout-17B-16E-Instruct",
    "Nemotron-3-Nano": "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Qwen3-235B": "Qwen__Qwen3-235B-A22B-FP8",
    "Qwen3-Coder-Next": "Qwen__Qwen3-Next-80B-A3B-Instruct",
    "Qwen3-VL-30B": "Qwen__Qwen3-VL-30B-A3B-Instruct",
    "Qwen3.5-35B": "Qwen__Qwen3.5-35B-A3B",
}
"""By a part of the name in the records: the model itself, or one whose layers keep the same (Llama 3.3 as 3.1, Maverick
as Scout, Coder-Next as Next)."""

OTHERWISE = {
    ("MI300X", "8"): "the printed GiB are rank 0's; the smallest rank has 0.42 less, and it decides",
    ("H200", "8", "v0.20.0", "616096"): "the memory and the tokens of this record do not belong together: its next of "
    "kin (0.18, 0.19) give 70,272 B a token, as the model does, and this one 71,873",
}
"""The records that cannot come out, and why."""


@dataclass(frozen=True)
class Boot:
    row: dict[str, str]
    plan: Plan

    @property
    def is_near(self) -> bool:
        """Tokens within 0.1 %, and the concurrency as well, or the same two printed decimals."""
        tokens = self.plan.kv_tokens / int(self.row["kv_cache_tokens"])
        printed = float(self.row["max_concurrency"])
        found = self.plan.max_concurrency()
        same = f"{found:.2f}" == f"{printed:.2f}" or abs(found / printed - 1) <= 0.001
        return abs(tokens - 1) <= 0.001 and same

    @property
    def reason(self) -> str | None:
        row = self.row
        keys = (
            (row["accelerator"], row["tp"]),
            (row["accelerator"], row["tp"], row["vllm_version"], row["kv_cache_tokens"]),
        )
        return next((OTHERWISE[key] for key in keys if key in OTHERWISE), None)


@pytest.fixture(scope="module")
def boots(shared: Path) -> list[Boot]:
    path = shared / "data" / "sizing" / "vllm_boot_records.csv"
    if not path.is_file():
        pytest.skip(f"no {path.name}")
    read = cache(lambda name, dtype: model(shared, name, dtype))
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [Boot(row, plan_of(row, read(config_of(row["model"]), row["kv_cache_dtype"]))) for row in rows]


def config_of(name: str) -> str:
    return next(config for part, config in CONFIGS.items() if part in name)


def plan_of(row: dict[str, str], model: object) -> Plan:
    version = re.match(r"v(\d+\.\d+\.\d+)", row["vllm_version"])
    assert version is not None
    architecture = device(row["accelerator"]).architecture
    assert architecture is not None
    return plan_memory(
        model,  # type: ignore[arg-type]
        int(float(row["available_kv_gib"]) * GIB),
        max_model_len=int(row["concurrency_at_tokens"]),
        deployment=Deployment(tp=int(row["tp"]), architecture=architecture),
        rule=rule(f"vllm-{version[1]}"),
    )


def test_tokens_and_concurrency_of_95_in_100_starts(boots: list[Boot]) -> None:
    """Of models that are among the files: 184 of 193, and all but those that cannot come out."""
    assert len(boots) == 203
    among = [boot for boot in boots if "Maverick" not in boot.row["model"]]
    near = [boot for boot in among if boot.is_near]
    assert len(among) == 193
    assert len(near) >= 0.95 * len(among)
    assert [boot.row for boot in boots if not boot.is_near and boot.reason is None] == []


def test_what_cannot_come_out_is_off_by_as_much_as_is_said(boots: list[Boot]) -> None:
    for boot in boots:
        if boot.row["accelerator"] == "MI300X" and boot.row["tp"] == "8":
            missing = boot.plan.num_blocks - int(boot.row["kv_cache_tokens"]) // 16
            assert 0.2 < missing * boot.plan.block_bytes / GIB < 0.5


def test_bytes_a_token_that_the_records_imply(boots: list[Boot]) -> None:
    """sizing_truths.md, A: memory through tokens, for models that keep everything."""
    for boot in boots:
        if boot.is_near and len(boot.plan.kinds) == 1:
            implied = float(boot.row["available_kv_gib"]) * GIB / int(boot.row["kv_cache_tokens"])
            assert float(boot.plan.bytes_per_token) == pytest.approx(implied, rel=0.002)
