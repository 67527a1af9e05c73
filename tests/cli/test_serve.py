"""`kvpool serve` as a program: it serves, ends in order when told to, and tells mistakes in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.cli.real_model import needs_the_demo_model

from kvpool.cli import serve
from kvpool.cli.main import main
from kvpool.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from kvpool import KVCacheManager
from kvpool.cli import local_model, serve
from kvpool.cli.main import main
from kvpool.serving.served_model import ServedModel
from tests.serving.toy import ByteTokenizer, ToyWorker

@contextmanager
def opened_model(options):
    cache = KVCacheManager(200, 4)
    model = ServedModel("toy", cache, ToyWorker(cache), ByteTokenizer(), 300)
    try:
        yield model, SimpleNamespace(start=SimpleNamespace(sizing=None))
    finally:
        print("closed")

local_model.opened_model = opened_model
serve.print_facts = lambda sizing: None
sys.exit(main(["serve", "--model", "toy", *sys.argv[1:]]))
"""


@contextmanager
def serving(*arguments: str, name: str = "toy") -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-c", PROGRAM, "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", serve.API_KEYS: ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        try:
            assert program.stderr is not None
            noted = program.stderr.readline()
            assert noted.startswith(f"kvpool: {name} on http://127.0.0.1:"), noted
            url = noted.split()[-1]
            _until_healthy(url, program)
            yield url, program
        finally:
            program.kill()


def _until_healthy(url: str, program: "subprocess.Popen[str]") -> None:
    while program.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            continue
    raise AssertionError(program.stderr.read() if program.stderr else "")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_it_is_told_to_end(sent: signal.Signals, code: int) -> None:
    with serving("--served-model-name", "mine", name="mine") as (url, program):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
        answer = httpx.post(f"{url}/v1/completions", json={"model": "mine", "prompt": "x", "max_tokens": 3}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        program.send_signal(sent)
        told, noted = program.communicate(timeout=60)
        assert program.returncode == code
        assert told == "closed\n"
        assert noted == ""


@needs_the_demo_model
def test_a_real_model_is_served_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--kv-gib", "0.1", "--max-model-len", "1024", "--max-num-batched-tokens", "256", "--threads", "1"]
    command = [sys.executable, "-m", "kvpool.cli.main", "serve", "--model", "demo", "--port", "0", *small]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stderr is not None
            noted = []
            for line in program.stderr:
                noted.append(line)
                if " on http" in line:
                    break
            url = noted[-1].split()[-1]
            _until_healthy(url, program)
            load = ["--workload", "system", "--num-requests", "4", "--concurrency", "2", "--reset"]
            cut = ["--max-prompt-tokens", "300", "--max-output-tokens", "3"]
            assert main(["bench", "--url", url, *load, *cut, "--json"]) == 0
            program.send_signal(signal.SIGTERM)
            program.wait(60)
        finally:
            program.kill()
    assert any(line.startswith("GPU KV cache size: ") for line in noted)
    assert program.returncode == 0
    run = json.loads(capsys.readouterr().out)
    assert (run["num_answered"], run["num_prompt"], run["num_outputs"]) == (4, 1200, 12)
    assert run["hit_rate"] > 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--model", "nowhere", "--max-num-batched-tokens", "8", "--max-num-seqs", "9"], "max_num_batched_tokens is 8"),
        (["--model", "nowhere", "--gpu-memory-utilization", "1.5"], "'1.5' is no share"),
        (["--model", "x", "--port", "70000"], "70000"),
        (["--model", "nowhere", "--kv-dtype", "int4"], "'int4' is not computed here"),
        (["--model", "nowhere", "--kv-gib", "1", "--gpu-memory-utilization", "0.5"], "one of them decides"),
        (["--model", "nowhere", "--api-key", ""], "an API key is empty"),
        (["--model", "x", "--timeout", "0"], "seconds"),
        (["--model", "x", "--timeout", "-1"], "more than 0"),
        (["--model", "x", "--drain", "-1"], "0 or more"),
        ([], "--model"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["serve", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--model", "nowhere", "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_of_two_that_start_at_once_the_second_is_told_before_it_loads() -> None:
    with serve._listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: Address already in use"):
            serve._listening("127.0.0.1", port)


def test_keys_come_from_both_places() -> None:
    assert serve.api_keys(["a"], "b, c") == ("a", "b", "c")
    assert serve.api_keys([], "") == ()
    with pytest.raises(ConfigError, match="empty"):
        serve.api_keys([""], "")


@pytest.mark.parametrize("library", ["starlette", "uvicorn", "prometheus_client"])
def test_a_missing_library_is_told_with_the_way_to_get_it(library: str) -> None:
    program = (
        f"import sys; sys.modules[{library!r}] = None; from kvpool.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", "--model", "x"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "pip install 'kvpool[serve]'" in done.stderr
    others = subprocess.run([sys.executable, "-c", program, "size", "--help"], capture_output=True, timeout=120)
    assert others.returncode == 0
