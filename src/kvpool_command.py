"""The command `kvpool`: it says in one line what is wrong even where the package itself cannot be imported."""

import sys

USER_MISTAKE = 2


def main() -> int:
    """Run one command; the exit code."""
    try:
        from kvpool.cli.main import main as run
    except (ImportError, ValueError) as error:  # ConfigError is a ValueError, and cannot be imported here either
        print(f"kvpool: {error}", file=sys.stderr)
        return USER_MISTAKE
    return run()
