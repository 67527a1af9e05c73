"""Traffic as it is named on a command line: a trace file, or a generated workload of `options.requests` requests.

Knows nothing of: what is done with it.
"""

import argparse
import os

from kvpool.errors import ConfigError
from kvpool.replay.chat import load_tokenizer
from kvpool.replay.readers import open_trace
from kvpool.replay.settings import Source
from kvpool.replay.workload import ARRIVALS, KINDS, Workload

Group = argparse._ArgumentGroup


def add_traffic_options(parser: argparse.ArgumentParser) -> Group:
    """All but how many requests a workload has, which commands ask for in their own words."""
    source = parser.add_argument_group("the traffic")
    source.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a trace file, plain or gzip; its format is found by looking"
    )
    source.add_argument("--workload", choices=KINDS, help="generate traffic instead")
    source.add_argument("--rate", type=float, default=2.0, metavar="R", help="sessions a second (default: %(default)s)")
    source.add_argument(
        "--arrivals", choices=ARRIVALS, default="poisson", help="of the workload (default: %(default)s)"
    )
    source.add_argument("--seed", type=int, default=0, help="of the workload (default: %(default)s)")
    source.add_argument(
        "--skip-bad", action="store_true", help="count bad lines of the trace instead of stopping at the first"
    )
    source.add_argument("--tokenizer", metavar="FOLDER", help="for chat traces: a Hugging Face tokenizer")
    source.add_argument(
        "--session-gap",
        type=float,
        default=60.0,
        metavar="S",
        help="between starts of agent sessions (default: %(default)s)",
    )
    return source


def traffic(options: argparse.Namespace) -> Source:
    """The one that was named. ConfigError for none or two, TraceError for a file that cannot be read."""
    if (options.trace is None) == (options.workload is None):
        raise ConfigError("give one of the two: a TRACE file, or --workload NAME for generated traffic")
    if options.workload is not None:
        return Workload(options.workload, options.seed, options.requests, options.rate, options.arrivals)
    # transformers would print a line about absent models, which a tokenizer does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    return open_trace(options.trace, skip_bad=options.skip_bad, tokenizer=tokenizer, session_gap_s=options.session_gap)
