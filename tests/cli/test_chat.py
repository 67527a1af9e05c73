"""`kvpool chat` against a real server with a toy model: through a pipe, and in a terminal."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.real_model import needs_the_demo_model
from tests.serving.served import MODEL, Running, running
from tests.serving.toy import HeldWorker, ToyWorker, continued

from kvpool import KVCacheManager
from kvpool.cli.chat_turns import facts
from kvpool.cli.main import main
from kvpool.cli.wrapped import Wrapped
from kvpool.client.answer import Answer, Usage
from kvpool.serving.app import ServerConfig


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as server:
        yield server


def chat(monkeypatch: pytest.MonkeyPatch, served: Running, lines: str, *more: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", "--url", served.url, "--max-tokens", "6", "--temperature", "0", *more])


def test_a_line_is_a_turn(served: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, served, "hello\n\nand more\n", "--salt", "turns") == 0
    told = capsys.readouterr()
    first = continued("<user>hello\n<assistant>", 6)
    second = continued(f"<user>hello\n<assistant>{first}\n<user>and more\n<assistant>", 6)
    assert told.out == f"{first}\n{second}\n"
    assert "23 tokens: 0 cached, 23 computed; " in told.err
    assert "56 tokens: 28 cached, 28 computed; " in told.err
    assert told.err.count("\n") == 2


def test_what_is_forgotten_is_not_sent(
    served: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, served, "hello\n/reset\nhello\n/quit\nhello\n", "--system", "be good") == 0
    answer = continued("<system>be good\n<user>hello\n<assistant>", 6)
    assert capsys.readouterr().out == f"{answer}\n{answer}\n"


def test_salts_keep_apart(served: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    turn = "a turn that is kept\n"
    assert chat(monkeypatch, served, f"{turn}/reset\n{turn}/reset\n/salt b\n{turn}/reset\n/salt\n{turn}") == 0
    cached = [line.split(" cached")[0].split()[-1] for line in capsys.readouterr().err.splitlines() if "cached" in line]
    assert cached == ["0", "36", "0", "36"]


def test_what_cannot_be_answered(
    served: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, served, f"{'x' * 3000}\nhello\n") == 1
    told = capsys.readouterr()
    assert "HTTP 400: the prompt has 3018 tokens" in told.err.replace("\n", " ")
    assert told.out.strip() == continued("<user>hello\n<assistant>", 6)


def test_an_unknown_command_is_not_sent(
    served: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, served, "/rest\n") == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "/rest is no command here" in told.err
    assert "/reset" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model demo"),
        (["--url", "127.0.0.1:8000"], "no address of a server"),
        (["--url", "http://127.0.0.1:9"], "nothing answers at http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--api-key", "ö"], "plain ASCII"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_model_that_is_not_served(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", served.url, "--model", "other"]) == 2
    assert f"other is not served at {served.url}: toy may be asked for" in capsys.readouterr().err


def test_a_key_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(config=ServerConfig(MODEL, api_keys=("secret",))) as served:
        assert chat(monkeypatch, served, "hello\n") == 2
        assert "HTTP 401: a known API key is needed" in capsys.readouterr().err
        monkeypatch.setenv("KVPOOL_API_KEY", "secret")
        assert chat(monkeypatch, served, "hello\n") == 0


# -- in a terminal


STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass
class Terminal:
    """A chat that a person has."""

    process: "subprocess.Popen[bytes]"
    fd: int
    seen: str = ""

    def until(self, text: str) -> str:
        """What is shown from now to where `text` ends."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            is_ready = select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))[0]
            assert is_ready, f"{text!r} does not come behind {self.seen!r}"
            self.seen += STYLES.sub("", os.read(self.fd, 4096).decode()).replace("\r\n", "\n")
        shown, self.seen = self.seen.split(text, 1)
        return shown + text

    def interrupt_prompt(self) -> None:
        """Until it is heard: a signal that comes just before the prompt waits for a key is seen with that key only."""
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            if select.select([self.fd], [], [], 1)[0]:
                return

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


@contextmanager
def terminal(url: str, columns: int) -> Iterator[Terminal]:
    near, far = pty.openpty()
    termios.tcsetwinsize(far, (24, columns))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool.cli.main", "chat", "--url", url, "--temperature", "0", "--max-tokens", "200"],
        stdin=far,
        stdout=far,
        stderr=far,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
    )
    os.close(far)
    try:
        yield Terminal(process, near)
    finally:
        process.kill()
        process.wait()
        os.close(near)


def test_a_person_ends_an_answer_and_goes_on() -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    worker.allow(60)
    with running(worker, cache) as served, terminal(served.url, 40) as shown, worker:
        assert "toy. /help" in shown.until("> ")
        shown.type("tell me all\n")
        shown.until(continued("<user>tell me all\n<assistant>", 200)[:8])
        shown.process.send_signal(signal.SIGINT)
        assert "cancelled, first token after" in shown.until("> ")
        worker.let_go()
        shown.type("hello!\n")
        answered = shown.until("> ")
        assert re.search(r"\n[1-9]\d* cached", answered)
        assert all(len(line) <= 40 for line in answered.splitlines())
        shown.interrupt_prompt()
        assert "Ctrl-D ends the chat" in shown.until("> ")
        shown.type("\x04")
        assert shown.process.wait(60) == 0


@pytest.mark.parametrize("width", [1, 12, 40])
def test_words_are_whole_and_nothing_is_lost(width: int) -> None:
    text = "Some words, some\nlines,  and a verylongwordthatfitsnowhere.\tEnd"
    written: list[str] = []
    shown = Wrapped(written.append, width)
    for start in range(0, len(text), 3):
        shown.add(text[start : start + 3])
    shown.finish()
    lines = "".join(written).splitlines()
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= width or " " not in line for line in lines)


def test_scripts_without_spaces_come_letter_by_letter() -> None:
    written: list[str] = []
    shown = Wrapped(written.append, 6)
    shown.add("日本語の")
    assert "".join(written) == "日本語\nの"


def test_a_model_does_not_move_the_cursor() -> None:
    written: list[str] = []
    shown = Wrapped(written.append, 80)
    shown.add("red \x1b[31mtext\x07")
    shown.finish()
    assert "".join(written) == "red ?[31mtext?\n"


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_what_a_turn_took_is_one_line(width: int) -> None:
    answer = Answer(sent_s=1.0, piece_at_s=[1.25, 2.0], usage=Usage(1032, 57, 992))
    line = facts(answer, width)
    assert "992 cached" in line
    assert "40" in line
    assert "0.25 s" in line
    assert len(line) < width or width == 20


def test_a_server_that_does_not_count() -> None:
    answer = Answer(sent_s=1.0, piece_at_s=[1.25], usage=Usage(10, 2, None))
    assert "10 tokens: - cached, - computed" in facts(answer, 80)
    assert facts(Answer(), 80) == "no counts, first token after -"


DEMO = ["chat", "--model", "demo", "--kv-gib", "0.1", "--max-model-len", "1024", "--max-num-batched-tokens", "256"]


@needs_the_demo_model
def test_a_real_model_in_a_worker_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", *DEMO, "--threads", "1", "--max-tokens", "5"],
        input="What is the capital of France?\nAnd of Italy?\n",
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    assert len(done.stdout.split("\n")) == 3
    first, second = (line for line in done.stderr.splitlines() if "cached" in line)
    assert " 0 cached" in first
    assert " 0 cached" not in second


@needs_the_demo_model
def test_nothing_is_left_of_a_chat_that_is_told_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvpool.cli.main", *DEMO, "--threads", "1", "--max-tokens", "5"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write("What is the capital of France?\n")
            program.stdin.flush()
            assert program.stdout.readline()
            assert list(tmp_path.glob("kvpool-*"))
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 143
        finally:
            program.kill()
    assert not list(tmp_path.glob("kvpool-*"))
