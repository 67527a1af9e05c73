"""`kvpool size`: what it prints, as text and as JSON, and how mistakes are told."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.main import main

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4_096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5_376, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21_504, "vocab_size": 262_208,
    "sliding_window": 1_024, "sliding_window_pattern": 6, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return written(tmp_path / "Llama-3.1-8B.json", LLAMA)


@pytest.fixture
def gemma(tmp_path: Path) -> str:
    return written(tmp_path / "gemma-3-27b.json", GEMMA)


Size = Callable[..., tuple[int, str, str]]


@pytest.fixture
def size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Size:
    """Runs the command: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(["size", *arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def written(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# -- answers


def test_llama_in_40_gib(size: Size, llama: str) -> None:
    code, out, err = size(llama, "--kv-gib", "40", "--max-model-len", "8192", "--json")
    (answer,) = objects(out)
    assert (code, err) == (0, "")
    assert answer["model"] == "Llama-3.1-8B"
    assert (answer["num_blocks"], answer["kv_tokens"], answer["block_bytes"]) == (20_480, 327_680, 2 * 2**20)
    assert (answer["bytes_per_token"], answer["max_model_len"], answer["rule"]) == (131_072, 8_192, "blocks")
    assert (answer["max_concurrency"], answer["num_requests"]) == (40.0, 39)
    assert answer["log_lines"] == [
        "GPU KV cache size: 327,680 tokens",
        "Maximum concurrency for 8,192 tokens per request: 40.00x",
    ]


def test_80_gb_by_hand(size: Size, tmp_path: Path) -> None:
    """64 layers, 8 KV heads of 128 in fp8; 80 GB x 0.9 - 20 - 4: 48 GB, decimal."""
    config = LLAMA | {"num_hidden_layers": 64, "hidden_size": 8_192, "num_attention_heads": 64}
    path = written(tmp_path / "config.json", config)
    how = (path, "--device", "80GB", "--gpu-memory-utilization", "0.9", "--weights", "20GB", "--overhead", "4GB")
    _, out, _ = size(*how, "--kv-dtype", "fp8", "--rule", "steady", "--json")
    (answer,) = objects(out)
    assert answer["kv_bytes"] == [48 * 10**9]
    assert (answer["bytes_per_token"], answer["kv_tokens"]) == (131_072, 366_210)
    _, out, _ = size(*how, "--kv-dtype", "fp8", "--json")
    assert objects(out)[0]["kv_tokens"] == 366_210 // 16 * 16
    _, out, _ = size(*how, "--kv-dtype", "fp8")
    assert "44.70" in out, "GiB"
    assert "48.00" in out, "GB"


def test_a_summary_fits_80_columns_and_has_the_two_lines(size: Size, llama: str, gemma: str) -> None:
    for model in (llama, gemma):
        code, out, _ = size(model, "--device", "H100", "--max-model-len", "8192")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert "GPU KV cache size: " in out
        assert "Maximum concurrency for 8,192 tokens per request: " in out
        assert "smallest prefix that can hit" in out
    assert "8 padding layers, at most 15.38 %" in " ".join(out.split())


def test_every_step_can_be_followed(size: Size, gemma: str) -> None:
    _, out, _ = size(gemma, "--device", "A100-80GB", "--max-model-len", "32K", "--explain")
    for step in (
        "79.15 GiB (84.99 GB) x 0.92 = 72.82 GiB (78.19 GB) for the engine",
        "52 x sliding window 1,024: 16 KV heads x 2 x 128 x 2 B = 8,192 B",
        "6 x sliding window 1,024: at most ceil(min(1,023 + 2,048 in flight, 32,768) / 16) + 1 = 193",
        "full attention: ceil(32,768 / 16) = 2,048",
        "together 3,206 blocks of 1,310,720 B",
        "rule blocks",
    ):
        assert step in out


def test_lists_give_a_table(size: Size, llama: str, gemma: str) -> None:
    code, out, _ = size(llama, gemma, "--device", "H100,A100-80GB", "--max-model-len", "8192,32K")
    rows = [line for line in out.splitlines() if line.strip().startswith(("Llama", "gemma"))]
    assert code == 0
    assert len(rows) == 8
    _, out, _ = size(llama, "--kv-gib", "40", "--kv-dtype", "auto,fp8,int8,fp4", "--json")
    assert [answer["bytes_per_token"] for answer in objects(out)] == [131_072, 65_536, 67_584, 36_864]


def test_the_longest_that_fits(size: Size, llama: str) -> None:
    _, out, _ = size(llama, "--kv-gib", "4", "--max-model-len", "auto", "--json")
    (answer,) = objects(out)
    assert answer["max_model_len"] == answer["longest_request"] == 2_047 * 16
    assert answer["fits"]
    _, out, _ = size(llama, "--kv-gib", "400", "--max-model-len", "-1", "--json")
    assert objects(out)[0]["max_model_len"] == 131_072, "no longer than what the model was made for"


def test_no_is_exit_code_1(size: Size, llama: str) -> None:
    code, out, _ = size(llama, "--kv-gib", "4")
    assert code == 1
    assert "Does not fit: a request of 131,072 tokens needs 16.00 GiB and has 4.00" in out
    assert "--max-model-len 32752" in out
    code, out, _ = size(llama, "--kv-gib", "4", "--json")
    assert code == 1
    assert not objects(out)[0]["fits"]
    code, out, _ = size(llama, "--device", "16GB")
    assert code == 1
    assert "the rest alone needs" in out


def test_two_stages_with_memory_of_their_own(size: Size, llama: str) -> None:
    code, out, _ = size(llama, "--kv-gib", "1,4", "--pp", "16,16", "--max-model-len", "8192")
    assert code == 0
    assert "stage 0" in out
    assert "which decides" in out
    _, out, _ = size(llama, "--device", "H100", "--pp", "2", "--json", "--max-model-len", "8192")
    (answer,) = objects(out)
    assert answer["pp"] == 2
    assert len(answer["budget"]) == 2


def test_what_users_need(size: Size, llama: str) -> None:
    code, out, _ = size(llama, "--users", "64", "--max-model-len", "32K", "--kv-gib", "100")
    assert code == 1
    assert "64 requests of 32,768 tokens need 256.00 GiB" in out
    code, out, _ = size(llama, "--users", "64", "--max-model-len", "32K")
    assert code == 0
    assert "H200" in out
    _, out, _ = size(llama, "--users", "64", "--max-model-len", "32K", "--json")
    for answer in objects(out):
        assert answer["num_requests"] >= 64
    code, out, _ = size(llama, "--users", "1000000", "--max-model-len", "32K")
    assert code == 1
    assert "No known device" in out


@pytest.mark.parametrize(
    "lengths",
    [
        "2000+500:3,8000:1",
        "prompt,output,count\n2000,500,3\n8000,0,1\n",
        "Output_Tokens,Count,Input_Tokens\n500,3,2000\n0,1,8000\n",
    ],
)
def test_requests_of_many_lengths(size: Size, llama: str, tmp_path: Path, lengths: str) -> None:
    if "\n" in lengths:
        (tmp_path / "lengths.csv").write_text(lengths)
        lengths = str(tmp_path / "lengths.csv")
    code, out, _ = size(llama, "--kv-gib", "40", "--for", lengths, "--json")
    found = objects(out)[0]["for"]
    assert code == 0
    assert found["mean_tokens"] == (3 * 2_500 + 8_000) / 4
    # 3 x 500 steps between 2,000 and 2,500 tokens, and one at 8,000
    assert found["mean_blocks"] == pytest.approx((1_500 * (125 + 157) / 2 + 500) / 1_501)
    assert found["mean_requests"] == pytest.approx(20_479 / found["mean_blocks"])
    assert found["at_full_length"] == pytest.approx(20_479 / ((1_500 * 157 + 500) / 1_501))
    assert 0 < found["safe_requests"] < found["mean_requests"]


def test_requests_of_a_real_trace(size: Size, llama: str, shared: Path) -> None:
    trace = shared / "data" / "traces" / "azure2023_conv.csv"
    if not trace.is_file():
        pytest.skip(f"no {trace}")
    code, out, _ = size(llama, "--kv-gib", "40", "--for", str(trace))
    assert code == 0
    assert "at a time on average" in " ".join(out.split())


def test_a_folder_and_standard_input(size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    written(folder / "config.json", LLAMA)
    _, out, _ = size(str(folder), "--kv-gib", "4", "--json")
    assert objects(out)[0]["model"] == "my-model"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(LLAMA).encode())))
    _, out, _ = size("-", "--kv-gib", "40", "--json")
    assert objects(out)[0]["num_blocks"] == 20_480


def test_a_draft_model_shares_the_pool(size: Size, llama: str, tmp_path: Path) -> None:
    draft = written(tmp_path / "draft.json", LLAMA | {"num_hidden_layers": 1})
    _, out, _ = size(llama, "--kv-gib", "33", "--draft-model", draft, "--json")
    assert objects(out)[0]["bytes_per_token"] == 33 * 4_096


def test_rules_of_releases(size: Size, gemma: str) -> None:
    tokens = []
    for rule in ("blocks", "steady", "vllm-0.18.0", "vllm-0.30.0"):
        _, out, _ = size(gemma, "--kv-gib", "20", "--max-model-len", "32K", "--rule", rule, "--json")
        tokens.append(objects(out)[0]["kv_tokens"])
    assert len(set(tokens)) == 4
    _, out, _ = size(gemma, "--kv-gib", "20", "--rule", "vllm-0.18.0")
    assert "vllm-0.18.0: as vLLM counts, 0.18.0 to before 0.19.0" in " ".join(out.split())


def test_a_model_that_keeps_nothing_needs_nothing(size: Size, tmp_path: Path) -> None:
    bert = written(
        tmp_path / "bert.json", {"model_type": "bert", "num_hidden_layers": 12, "max_position_embeddings": 512}
    )
    code, out, _ = size(bert, "--kv-gib", "1")
    assert code == 0
    assert "none: no layer keeps anything" in out
    code, out, _ = size(bert, "--kv-gib", "1", "--json")
    assert (code, objects(out)[0]["max_concurrency"]) == (0, None)


# -- mistakes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--device H100, or --kv-gib 40"),
        (("--kv-gib", "0"), "'0' is no memory in GiB"),
        (("--kv-gib", "nan"), "'nan' is no memory in GiB"),
        (("--kv-gib", "4,4"), "memory is given for 2 stages: there are 1"),
        (("--device", "H101"), "the nearest are H100"),
        (("--device", "A100"), "comes in 2 sizes"),
        (("--device", "80"), "name the unit"),
        (("--kv-gib", "4", "--tp", "3"), "8 KV heads cannot be split over 3 ranks"),
        (("--kv-gib", "4", "--tp", "0"), "'0' is no whole number of 1 or more"),
        (("--kv-gib", "4", "--pp", "16,17"), "pp 16,17 is 33 layers: the model has 32"),
        (("--kv-gib", "4", "--pp", "64"), "pp is 64: the model has 32 layers"),
        (("--kv-gib", "4", "--dcp", "3"), "dcp 3 does not divide tp 1"),
        (("--kv-gib", "4", "--rule", "vllm-0.5"), "the nearest is vllm-0.11.0"),
        (("--kv-gib", "4", "--rule", "sglang"), "blocks, steady, or vllm-VERSION"),
        (("--kv-gib", "4", "--kv-dtype", "fp3"), "KV dtype 'fp3' is not known"),
        (("--kv-gib", "4", "--max-model-len", "0"), "'0' is no length"),
        (("--kv-gib", "4", "--max-model-len", "99999999999"), "positions are int32"),
        (("--kv-gib", "4", "--gpu-memory-utilization", "92"), "'92' is no share"),
        (("--kv-gib", "4", "--for", "no-such-file"), "no-such-file"),
        (("--kv-gib", "4", "--for", "999999"), "longer than what fits"),
        (("--kv-gib", "4", "--for", "2000:" + "9" * 400), "which is the most"),
        (("--kv-gib", "4", "--mtp"), "has no draft heads"),
        (("--kv-gib", "4", "--tp", "8", "--dcp", "8"), "8 KV heads on 8 ranks leave 1"),
        (("--users", "4", "--for", "2000"), "--for and --explain are about one device"),
        (("--kv-gib", "4", "--weights", "H100"), "is a device"),
        (("--kv-gib", "4", "--model-type", "foo"), "model_type 'foo' is not known"),
        (("--kv-gib", "4", "--mamba-cache-mode", "some"), "invalid choice"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(size: Size, llama: str, arguments: tuple[str, ...], told: str) -> None:
    code, out, err = size(llama, *arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "is no JSON"),
        (b"[]", "an object with fields is needed"),
        (b"{}", "lacks model_type"),
        (b"\xff\xfe", "is no JSON"),
        (b'{"model_type": "llama", "cla_share_factor": 2}', "cla_share_factor"),
    ],
)
def test_files_that_are_no_configuration(size: Size, tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    code, out, err = size(str(path), "--kv-gib", "4")
    assert (code, out) == (2, "")
    assert told in err
    assert str(path) in err


def test_a_file_that_is_not_there(size: Size, tmp_path: Path) -> None:
    code, _, err = size(str(tmp_path / "none"), "--kv-gib", "4")
    assert code == 2
    assert "No such file" in err
