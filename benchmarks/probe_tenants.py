"""Can one tenant tell from time to first token what another one has asked?

A server of the demo model, over HTTP. Again and again a victim sends a secret prompt; then an attacker sends a guess
that is right, and one that is wrong, in an order of chance. Without salts the right guess is answered sooner; with a
`cache_salt` for each of both it is not. The p-value is that of a permutation test: how often is the sum of the signed
ranks of the pairs' differences as far from 0 when signs are drawn. `--picture FILE.svg` draws all times (needs
matplotlib).
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import perf_counter, sleep

import httpx
import numpy as np
from medians import print_table

Pairs = list[tuple[float, float]]
"""Seconds to the first token: of a wrong guess, and of the right one."""

NUM_TOKENS = 256
LOW_ID, HIGH_ID = 100, 40_000
SALTS = {"without salts": (None, None), "a salt each": ("victim", "attacker")}


@contextmanager
def server() -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", "demo", "--kv-gib", "1", "--threads", "1", "--max-num-batched-tokens", "512", "--port"]
    command = [sys.executable, "-c", "from kvpool.cli.main import main; main()", "serve", *options, str(port)]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                _wait(client, process)
                yield client
        finally:
            process.terminate()


def _wait(client: httpx.Client, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            sleep(0.5)
    raise RuntimeError("the server did not start")


def first_token_s(client: httpx.Client, prompt: Sequence[int], salt: str | None) -> float:
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    begin = perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return perf_counter() - begin


def probe(client: httpx.Client, salts: tuple[str | None, str | None], num_pairs: int, rng: Random) -> Pairs:
    victim, attacker = salts
    pairs = []
    for _ in range(num_pairs):
        secret, wrong = ([rng.randrange(LOW_ID, HIGH_ID) for _ in range(NUM_TOKENS)] for _ in range(2))
        first_token_s(client, secret, victim)
        guesses = [("wrong", wrong), ("right", secret)]
        rng.shuffle(guesses)
        took = {name: first_token_s(client, guess, attacker) for name, guess in guesses}
        pairs.append((took["wrong"], took["right"]))
    return pairs


def p_value(pairs: Pairs, num_draws: int = 20_000) -> float:
    """Of no difference between wrong and right, by drawing signs for the differences of the pairs."""
    differences = np.subtract(*np.array(pairs).T)
    ranks = np.abs(differences).argsort().argsort() + 1
    signs = np.random.default_rng(1).choice((-1, 1), (num_draws, len(pairs)))
    drawn, found = np.abs(signs @ ranks), abs(np.sign(differences) @ ranks)
    return float((1 + (drawn >= found).sum()) / (1 + num_draws))


def draw(found: dict[str, Pairs], path: Path) -> None:
    # Only the picture needs it.
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.hashsalt": "kvpool", "svg.fonttype": "none", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(found), figsize=(6, 2.6), sharey=True, layout="constrained")
    for panel, (name, pairs) in zip(panels, found.items(), strict=True):
        for place, column in enumerate(zip(*pairs, strict=True)):
            spread = np.linspace(-0.15, 0.15, len(column))
            panel.plot(place + spread, np.array(column) * 1e3, "o", markersize=3, alpha=0.7)
            panel.hlines(np.median(column) * 1e3, place - 0.3, place + 0.3, color="black")
        panel.set(title=name, xticks=(0, 1), xticklabels=("wrong guess", "right guess"), xlim=(-0.6, 1.6))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="first token, ms", ylim=(0, None))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, metavar="N", help="guesses of each kind (40)")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="where to draw all times")
    options = parser.parse_args()
    with server() as client:
        first_token_s(client, range(LOW_ID, LOW_ID + NUM_TOKENS), "warming up")
        found = {name: probe(client, salts, options.pairs, Random(1)) for name, salts in reversed(SALTS.items())}
    rows = []
    for name, pairs in found.items():
        wrong, right = (np.median(column) * 1e3 for column in zip(*pairs, strict=True))
        apart = np.median(np.subtract(*np.array(pairs).T)) * 1e3
        rows.append((name, f"{wrong:.1f}", f"{right:.1f}", f"{apart:.1f}", f"{p_value(pairs):.5f}"))
    columns = ("", "wrong guess, ms", "right guess, ms", "difference", "p")
    print_table(f"First token of {NUM_TOKENS}, medians of {options.pairs} pairs", columns, rows)
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
