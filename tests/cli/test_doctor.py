"""`kvpool doctor`: what is here, what is missing, and a core that is not sound."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from kvpool._native import features
from kvpool.cli import doctor
from kvpool.cli.main import main
from kvpool.core.block_pool import BlockPool
from kvpool.core.hashing import BlockHasher


def lines(told: str) -> dict[str, str]:
    """What is told of each thing."""
    return dict(line.split(None, 1) for line in told.splitlines())


def test_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = lines(capsys.readouterr().out)
    assert told["kvpool"].startswith(version("kvpool"))
    assert told["core"].split(":")[0] == features()["core"]
    assert told["SHA-256"] == features()["sha256"]
    assert told["replay"] == f"msgspec {version('msgspec')}, rich {version('rich')}"
    assert "test" not in told
    assert "as they should be" in told["self-check"]


def test_why_it_is_pure() -> None:
    environment = {**os.environ, "KVPOOL_NATIVE": "0"}
    command = [sys.executable, "-m", "kvpool.cli.main", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert lines(done.stdout)["core"] == "pure: KVPOOL_NATIVE is 0"
    assert lines(done.stdout)["SHA-256"] == "hashlib"


def test_an_extra_that_is_missing_can_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version_without_scipy(library: str) -> str:
        if library == "scipy":
            raise PackageNotFoundError(library)
        return version(library)

    monkeypatch.setattr(doctor, "version", version_without_scipy)
    assert main(["doctor"]) == 0
    assert lines(capsys.readouterr().out)["fit"] == "scipy is not installed: pip install 'kvpool[fit]'"


def test_it_needs_the_core_alone() -> None:
    program = "import sys; sys.modules['rich'] = None; from kvpool.cli.main import main; sys.exit(main())"
    for command, code in (("doctor", 0), ("replay", 2)):
        done = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert (done.stderr == "") == (code == 0)
        assert "Traceback" not in done.stderr
    assert "kvpool[replay]" in done.stderr
    assert "kvpool doctor" in done.stderr


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("yes", "kvpool: KVPOOL_NATIVE is 'yes': 0 for pure Python, 1 to insist on the native core, or unset"),
        ("1", "kvpool: KVPOOL_NATIVE is 1, and the native core cannot be imported"),
    ],
)
def test_a_core_that_cannot_be_had_is_one_line(wish: str, message: str) -> None:
    without = "import sys; sys.modules['kvpool._native._core'] = None; "
    program = without + "from kvpool_command import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KVPOOL_NATIVE": wish},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_wrong_names_are_seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = BlockHasher.names

    def wrong(hasher: BlockHasher, tokens: list[int]) -> list[bytes]:
        return [*right(hasher, tokens)[:-1], bytes(32)]

    monkeypatch.setattr(BlockHasher, "names", wrong)
    assert main(["doctor"]) == 1
    assert lines(capsys.readouterr().out)["self-check"].startswith(f"FAULTY: block 255 is named {'00' * 32}")


def test_a_wrong_pool_is_seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(BlockPool):
        def match(self, names: object, group_id: int = 0) -> list[int]:  # noqa: ARG002
            return []

    monkeypatch.setattr(doctor, "ChosenPool", Forgetful)
    assert main(["doctor"]) == 1
    assert lines(capsys.readouterr().out)["self-check"].startswith("FAULTY: the pool answers")
