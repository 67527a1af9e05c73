"""How long does it take to say what fits?

Reading a configuration, counting its weights and planning it, in one process, and the whole command in a new one; for
the models of `examples/configs/` and for made-up ones of 10,000 layers. Medians.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from medians import median_s, print_table

from kvpool.models.description import describe
from kvpool.models.sizing import Host, size_model
from kvpool.plan.devices import device

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
MANY = 10_000


def configs() -> dict[str, dict[str, Any]]:
    """By what they are called in the table."""
    real = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
    large = {f"{name}, {MANY:,} layers": config | {"num_hidden_layers": MANY} for name, config in real.items()}
    return real | large


def command_s(config: dict[str, Any]) -> float:
    """The whole command, the interpreter's start included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        words = [sys.executable, "-m", "kvpool.cli.main", "size", str(path), "--device", "B200", "--json"]
        return median_s(lambda: subprocess.run(words, check=False, stdout=subprocess.DEVNULL), repeats=5)


def rows() -> list[list[str]]:
    host = Host(device("B200"))
    found = []
    for name, config in configs().items():
        reading = median_s(lambda config=config: describe(config), repeats=5)  # type: ignore[misc]
        described = describe(config)
        planning = median_s(lambda described=described: size_model(described, host), repeats=5)  # type: ignore[misc]
        times = (reading, planning, command_s(config))
        found.append([name, *(f"{seconds * 1e3:,.1f}" for seconds in times)])
    return found


if __name__ == "__main__":
    print_table("How much fits, in ms", ["model", "reading", "planning", "kvpool size"], rows())
