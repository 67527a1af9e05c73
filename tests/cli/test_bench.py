"""`kvpool bench` against real servers with a toy model, and what it makes of the figures."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.serving.served import MODEL, Running, running

from kvpool import KVCacheManager
from kvpool.cli.main import main
from kvpool.client.answer import Answer, Usage
from kvpool.client.figures import figures
from kvpool.client.load import Outcome
from kvpool.client.prompts import WORDS, Prompts
from kvpool.client.server import Server
from kvpool.replay.trace import TraceRequest
from kvpool.replay.workload import Workload
from kvpool.serving.app import ServerConfig

CUT = ("--max-prompt-tokens", "200", "--max-output-tokens", "5")


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(cache=KVCacheManager(4096, 4)) as server:
        yield server


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests of 1,100 tokens, the last two with the first block of 512 in common."""
    path = tmp_path / "trace.jsonl"
    ids = ([1, 2, 3], [4, 5, 6], [4, 7, 8])
    lines = (
        {"timestamp": 40 * at, "input_length": 1100, "output_length": 3, "hash_ids": each}
        for at, each in enumerate(ids)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["bench", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_workload_closed_loop(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    [run] = told(
        capsys,
        "--url",
        served.url,
        "--workload",
        "system",
        "--num-requests",
        "12",
        "--concurrency",
        "4",
        "--reset",
        *CUT,
    )
    assert (run["num_requests"], run["num_answered"], run["errors"]) == (12, 12, {})
    assert (run["num_prompt"], run["num_outputs"]) == (12 * 200, 12 * 5)
    assert (run["model"], run["trace"], run["prompts"], run["concurrency"]) == (MODEL, "system", "token ids", 4)
    assert 0 < run["num_cached"] < run["num_prompt"]
    assert run["hit_rate"] == run["num_cached"] / run["num_prompt"]
    first, whole = run["time_to_first_token_s"], run["end_to_end_s"]
    assert 0 < first["p50"] <= first["p90"] <= first["p99"] <= first["max"] <= whole["max"] <= run["duration_s"]
    assert run["requests_per_s"] == pytest.approx(12 / run["duration_s"])


def test_a_trace_at_its_times(served: Running, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [slow] = told(capsys, str(trace), "--url", served.url, "--reset", "--speed", "0.1")
    assert slow["duration_s"] >= 0.8
    # A block of the trace is found but for what the server's own blocks leave over.
    assert slow["num_cached"] == 512
    assert slow["num_prompt"] == 3300
    [again] = told(capsys, str(trace), "--url", served.url)
    assert again["num_cached"] > 3 * 1090


def test_two_servers_side_by_side(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--workload", "oneshot", "--num-requests", "4", "--rate", "50", *CUT)
    assert main(["bench", "--url", served.url, "--url", f"{served.url}/v1/", *arguments]) == 0
    shown = capsys.readouterr().out
    assert f"A {served.url} toy\nB {served.url} toy\n" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["answered", "4", "4", "1.00"] in rows
    assert ["prompt", "tokens", "800", "800", "1.00"] in rows
    assert "time to first token, p99" in shown


def test_what_the_second_server_cannot_do_is_told_before_the_first_one_works(
    served: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    def num_ended() -> float:
        with served.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("kvpool_requests_total"))

    before, lost = num_ended(), f"{served.url}/elsewhere"
    arguments = ("--workload", "oneshot", "--num-requests", "40", "--speed", "1000")
    assert main(["bench", "--url", served.url, "--url", lost, *arguments]) == 2
    assert f"{lost}/v1/models: HTTP 404" in capsys.readouterr().err
    assert num_ended() - before <= 2, "more than what shows what a server takes"


def test_a_server_that_cannot_be_told_to_forget(
    served: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    json_of = Server._json

    async def without_reset(server: Server, method: str, path: str, *more: Any) -> dict[str, Any]:
        return await json_of(server, method, path.replace("/reset_prefix_cache", "/nowhere"), *more)

    monkeypatch.setattr(Server, "_json", without_reset)
    assert main(["bench", "--url", served.url, "--workload", "oneshot", "--num-requests", "1", "--reset"]) == 2
    assert f"{served.url} has no /reset_prefix_cache" in capsys.readouterr().err


def test_tenants_are_kept_apart(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--url", served.url, "--workload", "mixed", "--num-requests", "12", "--concurrency", "2", "--reset")
    [together] = told(capsys, *arguments, *CUT)
    [apart] = told(capsys, *arguments, *CUT, "--separate-tenants")
    assert apart["num_cached"] < together["num_cached"]


def test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with running(max_model_len=64) as served:
        arguments = ("--url", served.url, "--workload", "oneshot", "--num-requests", "3", "--concurrency", "1")
        assert main(["bench", *arguments]) == 1
        shown = capsys.readouterr().out
        assert "failed" in shown
        assert "HTTP 400: the prompt has" in shown
        assert main(["bench", *arguments, "--json"]) == 1
        run = json.loads(capsys.readouterr().out)
    assert run["num_answered"] == 0
    assert sum(run["errors"].values()) == 3
    assert run["time_to_first_token_s"] is None
    assert run["num_cached"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "give one of the two: a TRACE file, or --workload"),
        (["--url", "http://127.0.0.1:9", "--workload", "chat"], "nothing answers at http://127.0.0.1:9"),
        (["--workload", "chat"], "--url"),
        (["--workload", "chat", *["--url", "http://a"] * 3], "once, or twice"),
        (["--url", "http://a", "--workload", "chat", "--speed", "0"], "speed is 0.0"),
        (["--url", "http://a", "none.jsonl"], "none.jsonl: cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["bench", *arguments])
    except SystemExit as error:
        code = error.code
    told = capsys.readouterr()
    assert code == 2
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_a_wrong_key_is_told_before(capsys: pytest.CaptureFixture[str]) -> None:
    with running(config=ServerConfig(MODEL, api_keys=("secret",))) as served:
        arguments = ["bench", "--url", served.url, "--workload", "oneshot", "--num-requests", "2", *CUT]
        assert main([*arguments, "--api-key", "wrong"]) == 2
        assert "HTTP 401" in capsys.readouterr().err
        assert main([*arguments, "--api-key", "secret", "--concurrency", "1"]) == 0


class Plain(BaseHTTPRequestHandler):
    """Another server: it knows no token ids, and counts nothing."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "plain"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._send(404, "no such thing here")
        elif "ignore_eos" in body:
            self._send(400, json.dumps({"error": {"message": "ignore_eos is not known"}}))
        else:
            pieces = [{"choices": [{"text": text, "finish_reason": None}]} for text in ("a", "b")]
            self._send(200, "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, content: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())


def test_a_server_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        arguments = ["bench", "--url", f"http://127.0.0.1:{server.server_port}", "--workload", "oneshot", *CUT]
        assert main([*arguments, "--concurrency", "2"]) == 2
        assert "HTTP 400: ignore_eos is not known" in capsys.readouterr().err
        assert main([*arguments, "--concurrency", "2", "--num-requests", "3", "--end-early"]) == 0
        server.shutdown()
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["answered", "3"] in rows
    assert ["hit", "rate", "-"] in rows
    assert ["output", "tokens", "6"] in rows
    assert "does not say what it had in its cache" in shown
    assert "prompts went as texts" in shown


# -- prompts


def request(number: int, num_tokens: int, block_ids: list[int] | None) -> TraceRequest:
    return TraceRequest(f"r{number}", 0.0, num_tokens, 1, block_ids=block_ids)


@pytest.mark.parametrize("letters", [list(range(50, 350)), WORDS])
def test_prompts_share_what_ids_say(letters: list[int] | list[str]) -> None:
    prompts = Prompts(letters, 8)
    made = [prompts.prompt(request(at, 20, ids), at) for at, ids in enumerate(([1, 2, 3], [1, 2, 4], [5, 2], None))]
    rows = [each.split() if isinstance(each, str) else each for each in made]
    assert [len(row) for row in rows] == [20] * 4
    assert {letter for row in rows for letter in row} <= set(letters)
    assert rows[0][:16] == rows[1][:16]
    assert rows[0][16:] != rows[1][16:]
    assert rows[2][8:16] == rows[0][8:16]
    for one, other in ((0, 2), (0, 3), (2, 3)):
        assert rows[one][:8] != rows[other][:8]


def test_prompts_share_what_tokens_say() -> None:
    prompts = Prompts(list(range(300)), None)
    made = [prompts.prompt(each, 0, 64) for each in Workload("system", num_requests=20)]
    assert len({tuple(each) for each in made}) == 4
    assert {len(each) for each in made} == {64}


# -- figures


def outcome(sent_s: float, pieces_s: list[float], usage: Usage | None, error: str | None = None) -> Outcome:
    answer = Answer(sent_s=sent_s, piece_at_s=pieces_s, usage=usage)
    return Outcome(100, 0.0, answer, pieces_s[-1] if pieces_s else sent_s + 1, error)


def test_figures_are_those_of_what_was_answered() -> None:
    made = figures(
        [
            outcome(0.0, [1.0, 1.5, 3.0], Usage(90, 5, 64)),
            outcome(1.0, [2.0, 2.5], Usage(110, 2, None)),
            outcome(2.0, [], None, "gone"),
        ]
    )
    assert (made.num_requests, made.num_answered, made.errors) == (3, 2, {"gone": 1})
    assert (made.num_prompt, made.num_cached, made.num_outputs) == (200, 64, 7)
    assert made.hit_rate == 0.32
    assert made.duration_s == 3.0
    assert made.time_to_first_token_s is not None
    assert made.time_to_first_token_s.mean == 1.0
    assert made.time_per_output_token_s is not None
    assert made.time_per_output_token_s.max == 0.5
    assert made.inter_token_s is not None
    assert made.inter_token_s.max == 1.5
    assert made.rates()["output_tokens_per_s"] == pytest.approx(7 / 3)


def test_tokens_without_a_text_count() -> None:
    """Of 5 tokens the last three are special ones."""
    answer = Answer(0.0, [1.0, 2.0], Usage(10, 5, 0), "length", 5.0)
    made = figures([Outcome(10, 0.0, answer, 5.0)])
    assert made.time_per_output_token_s is not None
    assert made.time_per_output_token_s.mean == 1.0
    assert made.end_to_end_s is not None
    assert made.end_to_end_s.mean == 5.0
    silent = Answer(0.0, [], Usage(10, 1, 0), "length", 2.0)
    assert (silent.first_token_s, silent.last_token_s) == (2.0, 2.0)


def test_a_server_that_does_not_count() -> None:
    made = figures([outcome(0.0, [1.0, 1.5, 3.0], None)])
    assert (made.num_prompt, made.num_outputs, made.num_cached, made.hit_rate) == (100, 3, None, None)
