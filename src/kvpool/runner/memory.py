"""How much memory a worker may use, how much of it is free, and what a computation takes at its peak.

Knows nothing of: what the memory is for.
"""

import ctypes
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import ConfigError, MissingExtraError

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "engine") from error

_ROOT = Path("/")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESETS_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a device, or of the container that this process is in. Files that are only cached count as free."""

    total_bytes: int
    free_bytes: int


def memory_of(device: str) -> Memory:
    """ConfigError where a system does not tell."""
    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    return host_memory()


def host_memory(root: Path = _ROOT) -> Memory:
    """The machine's memory, or what control groups (version 1 or 2) leave of it to this process."""
    machine = _meminfo(root)
    total, free = machine.total_bytes, machine.free_bytes
    for limit, used in _limits(root):
        total, free = min(total, limit), min(free, limit - used)
    return Memory(total, max(free, 0))


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """By how much memory in use grew at most while `run` ran."""
    if torch.device(device).type == "cuda":
        return _cuda_peak(run, device)
    _give_back()
    try:
        _CLEAR.write_text(_RESETS_PEAK)
        before = _fields(_STATUS)["VmRSS"]
        run()
        return max(_fields(_STATUS)["VmHWM"] - before, 0)
    except (OSError, KeyError):
        before = _largest_ever()
        run()
        return _largest_ever() - before


def _cuda_peak(run: Callable[[], object], device: str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - int(before)


def _give_back() -> None:
    """What the allocator has kept of earlier runs would not be seen to grow again; glibc alone can be told."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _largest_ever() -> int:
    """Of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _meminfo(root: Path) -> Memory:
    try:
        fields = _fields(root / "proc/meminfo")
        return Memory(fields["MemTotal"], fields["MemAvailable"])
    except (OSError, KeyError):
        raise ConfigError("this system does not tell how much memory is free: give --kv-gib") from None


def _fields(path: Path) -> dict[str, int]:
    """Bytes, from lines such as `MemTotal:  24684084 kB`."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {each[0].rstrip(":"): int(each[1]) * 1024 for each in words if len(each) == 3 and each[2] == "kB"}


@dataclass(frozen=True, slots=True)
class _Files:
    """Of a version of control groups."""

    limit: str
    used: str
    cached: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of this process's group and of each above it, and what is in use there."""
    for folder, files in _groups(root):
        for each in (folder, *folder.parents):
            limit = _number(each / files.limit)
            if limit is not None:
                yield limit, (_number(each / files.used) or 0) - _cached(each, files)
            if each == root / "sys/fs/cgroup":
                break


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield mounted / path.lstrip("/"), _V2
        elif "memory" in controllers.split(","):
            yield mounted / "memory" / path.lstrip("/"), _V1


def _number(path: Path) -> int | None:
    """None where there is no file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(folder: Path, files: _Files) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for name, value in map(str.split, lines) if name == files.cached), 0)
