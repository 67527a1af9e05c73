"""Options and fixtures for all tests."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long a test takes says nothing on a machine that others use too.
settings.register_profile("kvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvpool")

_ROOT = Path(__file__).parents[1]
_OPERATIONS, _DEEP_OPERATIONS = 200_000, 2_000_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="run the tests marked deep, and ten times longer histories")
    parser.addoption("--operations", type=int, help="how many random operations the model test does")
    parser.addoption("--fuzz-seconds", type=float, help="how long the native core is given wrong arguments")
    parser.addoption("--seed", type=int, help="the seed of all random tests; a new one every run unless given")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--deep"):
        return
    for item in items:
        if item.get_closest_marker("deep"):
            item.add_marker(pytest.mark.skip(reason="deep: run with --deep"))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        config.option.seed = int.from_bytes(os.urandom(4), "big")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (repeat with --seed)"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run, printed so that a failure shows it."""
    seed: int = request.config.getoption("--seed")
    print(f"--seed {seed}")
    return seed


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def num_operations(request: pytest.FixtureRequest) -> int:
    """How many operations a long random history has."""
    given: int | None = request.config.getoption("--operations")
    return given or (_DEEP_OPERATIONS if request.config.getoption("--deep") else _OPERATIONS)


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """How long to look for arguments that break something."""
    given: float | None = request.config.getoption("--fuzz-seconds")
    return given or (60 if request.config.getoption("--deep") else 3)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden histories and traces beside the project; skips where it is not there."""
    folder = Path(os.environ.get("KVPOOL_SHARED", _ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: set KVPOOL_SHARED to run on shared traces and golden histories")
    return folder
