"""Which C++ sources these are. `setup.py` runs this file by its path, before there is a package.

Knows nothing of: what they say.
"""

from hashlib import sha256
from pathlib import Path


def digest(folder: Path) -> str | None:
    """Of all C++ sources in a folder; None where there are none, as in a wheel."""
    paths = sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")])
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16] if paths else None
