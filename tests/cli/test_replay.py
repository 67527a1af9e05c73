"""`kvpool replay` as a person or a script meets it."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import LocalCluster

from kvpool.cli.main import main

REQUIRED = (
    *("trace", "mode", "policy", "block_size", "num_blocks", "num_requests", "total_blocks", "hit_blocks"),
    *("ideal_hit_blocks", "total_tokens", "hit_tokens", "evictions", "preemptions"),
)
SMALL = ("replay", "--workload", "chat", "--requests", "60")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 1536, "output_length": 5, "hash_ids": [0, 1, n + 2]} for n in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def reports(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    """What a run with --json prints: one object a line, and nothing else on either stream."""
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


def test_json_has_the_promised_fields(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (report,) = reports(capsys, "replay", str(trace), "--num-blocks", "100")
    assert [name for name in REQUIRED if name not in report] == []
    assert report["trace"] == "trace.jsonl"
    assert (report["num_requests"], report["total_tokens"], report["hit_tokens"]) == (20, 20 * 1536, 19 * 1024)
    assert "timing" not in report
    (in_engine,) = reports(capsys, "replay", str(trace), "--num-blocks", "100", "--mode", "engine")
    assert [name for name in REQUIRED if name not in in_engine] == []
    assert in_engine["timing"]["num_finished"] == 20  # type: ignore[index]


def test_a_sweep_is_every_combination_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    swept = reports(capsys, *SMALL, "--sweep", "num_blocks=200,2_000", "--sweep", "seed=1,2", "--workers", "2")
    assert [(r["num_blocks"], r["seed"]) for r in swept] == [(200, 1), (200, 2), (2_000, 1), (2_000, 2)]
    assert swept[0]["sweep"] == {"num_blocks": 200, "seed": 1}
    (alone,) = reports(capsys, *SMALL, "--num-blocks", "200", "--seed", "2")
    assert {name: value for name, value in swept[1].items() if name != "sweep"} == alone


def test_a_sweep_on_a_dask_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        swept = reports(capsys, *SMALL, "--sweep", "num_blocks=200,900", "--dask", cluster.scheduler_address)
    assert [r["num_blocks"] for r in swept] == [200, 900]


def test_size_by_memory(capsys: pytest.CaptureFixture[str]) -> None:
    (by_bytes,) = reports(capsys, *SMALL, "--kv-gib", "1", "--bytes-per-token", "131072")
    (by_model,) = reports(capsys, *SMALL, "--kv-gib", "1", "--model", "Llama-3.1-8B")
    assert by_bytes["num_blocks"] == by_model["num_blocks"] == 512, "2 MiB a block of 16"


def test_step_times_can_be_given(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (report,) = reports(
        capsys, "replay", str(trace), "--num-blocks", "100", "--mode", "engine", "--base-ms", "500", "--prefill-us", "0"
    )
    assert report["timing"]["duration_s"] > 20  # type: ignore[index]


def test_tables_show_numerator_denominator_and_the_rule(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["replay", str(trace), "--num-blocks", "100"]) == 0
    shown = capsys.readouterr().out
    for text in ("19,456", "30,720", "63.33%", "mean of requests", "the last prompt token is always computed"):
        assert text in " ".join(shown.split())
    assert main(["replay", str(trace), "--sweep", "num_blocks=10,100"]) == 0
    assert "2 runs" in capsys.readouterr().out


def test_tables_fit_into_80_columns(trace: Path) -> None:
    for arguments in (
        [str(trace), "--num-blocks", "100", "--mode", "engine"],
        ["--workload", "mixed", "--requests", "80", "--sweep", "num_blocks=2000,3000", "--mode", "engine"],
    ):
        command = [sys.executable, "-m", "kvpool.cli.main", "replay", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={"COLUMNS": "80", "PATH": ""})
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "…" not in done.stdout.replace("… and", "")


def test_traffic_without_reuse_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--workload", "oneshot", "--requests", "20", "--num-blocks", "5000"]) == 0
    assert "no cache of any size can help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["replay"], "a TRACE file, or --workload"),
        (["replay", "TRACE", "--workload", "chat", "--num-blocks", "9"], "a TRACE file, or --workload"),
        (["replay", "TRACE"], "--num-blocks N, or --kv-gib G"),
        (["replay", "TRACE", "--num-blocks", "9", "--kv-gib", "1"], "in one way"),
        (["replay", "TRACE", "--kv-gib", "1"], "--bytes-per-token B, or --model"),
        (["replay", "TRACE", "--kv-gib", "-1", "--bytes-per-token", "5"], "more than 0"),
        (["replay", "TRACE", "--kv-gib", "nan", "--bytes-per-token", "5"], "more than 0"),
        (["replay", "TRACE", "--num-blocks", "many"], "--num-blocks"),
        (["replay", "TRACE", "--num-blocks", "1"], "num_blocks is 1"),
        (["replay", "TRACE", "--num-blocks", "9", "--block-size", "0"], "block_size is 0"),
        (["replay", "TRACE", "--num-blocks", "9", "--block-size", "-4"], "block_size is -4"),
        (["replay", "TRACE", "--num-blocks", "9", "--block-size", "100"], "64 or 512 work"),
        (["replay", "TRACE", "--num-blocks", "9", "--raw", "--mode", "engine"], "raw counting"),
        (["replay", "LENGTHS", "--num-blocks", "99", "--raw"], "raw counting counts"),
        (["replay", "TRACE", "--sweep", "num_blocks=9", "--sweep", "num_blocks=10"], "swept twice"),
        (["replay", "TRACE", "--num-blocks", "9", "--sweep", "seed=1,2"], "of a --workload"),
        (["replay", "TRACE", "--num-blocks", "100000000000"], "to 2147483647"),
        (["replay", "TRACE", "--kv-gib", "1e300", "--bytes-per-token", "1"], "below 2**30 GiB"),
        (["replay", "TRACE", "--kv-gib", "1", "--bytes-per-token", "0"], "more than 0"),
        (["replay", "TRACE", "--num-blocks", "9", "--mode", "engine", "--base-ms", "inf"], "base_s is inf"),
        (["replay", "--workload", "chat", "--num-blocks", "9", "--seed", "-1"], "seed is -1"),
        (["replay", "--workload", "chat", "--num-blocks", "9", "--rate", "1e-320"], "from 1e-9 to 1e9"),
        (["replay", "TRACE", "--sweep", "colour=1"], "colour=1"),
        (["replay", "TRACE", "--sweep", "num_blocks="], "num_blocks="),
        (["replay", "TRACE", "--sweep", "num_blocks=1,x"], "num_blocks=1,x"),
        (["replay", "TRACE", "--sweep", "num_blocks=9,10", "--workers", "0"], "--workers is 0"),
        (["replay", "TRACE", "--num-blocks", "9", "--mode", "engine", "--watermark", "1.5"], "watermark is 1.5"),
        (["replay", "TRACE", "--num-blocks", "9", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["replay", "TRACE", "--num-blocks", "9", "--max-num-batched-tokens", "9"], "below max_num_seqs 256"),
        (["replay", "TRACE", "--num-blocks", "9", "--num-accelerators", "0"], "--num-accelerators is 0"),
        (["replay", "TRACE", "--num-blocks", "9", "--base-ms", "-1"], "base_s is -0.001"),
        (["replay", "--workload", "chat", "--num-blocks", "9", "--requests", "0"], "num_requests is 0"),
        (["replay", "TRACE", "--num-blocks", "9", "--tokenizer", "nowhere"], "nowhere"),
        (["replay", "nowhere.jsonl", "--num-blocks", "9"], "nowhere.jsonl: cannot be read"),
        (
            ["replay", "TRACE", "--num-blocks", "9", "--dask", "tcp://127.0.0.1:1", "--sweep", "watermark=0,0.1"],
            "--dask",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = trace.with_name("lengths.csv")
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    files = {"TRACE": str(trace), "LENGTHS": str(lengths)}
    assert exit_code([files.get(argument, argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert "Traceback" not in err


def exit_code(arguments: list[str]) -> int:
    """argparse ends the process by itself."""
    try:
        return main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


def test_broken_traces(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gzip.compress(trace.read_bytes())
    cut, other, bad = tmp_path / "cut.gz", tmp_path / "other.txt", tmp_path / "bad.jsonl"
    cut.write_bytes(packed[: len(packed) // 2])
    other.write_text("hello\n")
    bad.write_text(trace.read_text().replace('"input_length": 1536', '"input_length": -5', 1))
    for path, message in ((cut, "cut off"), (other, "unknown format"), (bad, "bad.jsonl:1:")):
        assert main(["replay", str(path), "--num-blocks", "100"]) == 2
        assert message in capsys.readouterr().err
    (report,) = reports(capsys, "replay", str(bad), "--num-blocks", "100", "--skip-bad")
    assert (report["num_requests"], report["num_skipped_lines"]) == (19, 1)


def test_a_closed_pipe_is_no_mistake(trace: Path) -> None:
    command = f"{sys.executable} -m kvpool.cli.main replay {trace} --sweep num_blocks=10,20,30 --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["replay", "--help"]):
        assert exit_code(arguments) == 0
    assert "--sweep" in capsys.readouterr().out


@pytest.mark.parametrize("library", ["rich", "msgspec"])
def test_a_missing_extra_is_named(library: str) -> None:
    script = (
        f"import sys; sys.modules[{library!r}] = None; from kvpool.cli.main import main; sys.exit(main(['replay']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{library} is not installed: pip install 'kvpool[replay]'" in done.stderr


def test_a_bar_only_where_a_person_watches(trace: Path) -> None:
    command = [sys.executable, "-m", "kvpool.cli.main", "replay", str(trace), "--sweep", "num_blocks=10,20", "--json"]
    shown_to_a_person = subprocess.run(
        ["script", "-qec", " ".join(command), "/dev/null"], capture_output=True, text=True, check=True
    )
    assert "runs" in shown_to_a_person.stdout
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


def test_names_from_a_file_are_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tr[v2].jsonl"
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0], "tenant": "[/foo]\x1b[31m"}
    path.write_text(json.dumps(line))
    assert main(["replay", str(path), "--num-blocks", "10"]) == 0
    shown = capsys.readouterr().out
    assert "tr[v2].jsonl" in shown
    assert "[/foo]?[31m" in shown


def test_a_full_disk_and_a_closed_output_are_one_line(trace: Path) -> None:
    for redirection in (">/dev/full", ">&-"):
        command = f"{sys.executable} -m kvpool.cli.main replay {trace} --num-blocks 10 {redirection}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_an_interrupted_sweep_ends_at_once() -> None:
    command = [sys.executable, "-m", "kvpool.cli.main", "replay", "--workload", "mixed", "--requests", "40000"]
    sweep = ["--sweep", "num_blocks=10000,20000,30000,40000,50000", "--workers", "2"]
    with subprocess.Popen([*command, *sweep], stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        wait_for_workers(running.pid)
        os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=15)
    assert running.returncode == 130
    assert "Traceback" not in err


def wait_for_workers(pid: int) -> None:
    """Until the process has started others, at most half a minute."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for _ in range(300):
        if children.read_text().split():
            break
        time.sleep(0.1)
    time.sleep(0.5)
