"""Tests of real models on pages: skipped, in one line, where torch and transformers are not installed."""

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

_IS_THERE = all(find_spec(library) for library in ("torch", "transformers"))


class _NotCollected(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip("torch and transformers are not installed: pip install 'kvpool[engine]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if _IS_THERE:
        return None
    module: _NotCollected = _NotCollected.from_parent(parent, path=module_path)
    return module


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With -v: how far from the truth logits were."""
    if not _IS_THERE or terminalreporter.verbosity < 0:
        return
    from tests.runner import stock

    for name, (delta, allowed) in stock.largest.items():
        terminalreporter.write_line(f"{name}: logits off by {delta:.1e} at most, {allowed:.1e} allowed there")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small models are faster so, and always equally exact."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield
    torch.set_num_threads(before)
