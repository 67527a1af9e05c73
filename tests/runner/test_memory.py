"""What there is to use: of the machine, of its control groups, and what a computation took."""

from pathlib import Path

import pytest

from kvpool.errors import ConfigError

pytest.importorskip("torch", reason="torch is missing: pip install 'kvpool[engine]'")

from kvpool.runner.memory import Memory, host_memory, peak_bytes

GIB, MIB = 2**30, 2**20


def machine(root: Path, *groups: str, total: int = 64 * GIB, free: int = 32 * GIB) -> Path:
    (root / "proc/self").mkdir(parents=True)
    lines = [f"MemTotal: {total // 1024} kB", f"MemAvailable:  {free // 1024} kB", "HugePages_Total:   0"]
    (root / "proc/meminfo").write_text("\n".join(lines))
    (root / "proc/self/cgroup").write_text("\n".join(groups))
    return root


def limited(folder: Path, limit: int | str, used: int, cached: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path)) == Memory(64 * GIB, 32 * GIB)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/")
    limited(root / "sys/fs/cgroup", 8 * GIB, 3 * GIB, cached=GIB)
    assert host_memory(root) == Memory(8 * GIB, 6 * GIB)


def test_the_narrowest_of_all_groups_above(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/slice/pod/container")
    groups = root / "sys/fs/cgroup"
    limited(groups / "slice", 16 * GIB, 15 * GIB)
    limited(groups / "slice/pod", "max", 2 * GIB)
    limited(groups / "slice/pod/container", 8 * GIB, 2 * GIB)
    assert host_memory(root) == Memory(8 * GIB, GIB)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, "9:name=systemd:/", "4:cpu,memory:/docker/abc", "0::/")
    limited(root / "sys/fs/cgroup/memory/docker/abc", 4 * GIB, GIB, cached=GIB // 2, version=1)
    limited(root / "sys/fs/cgroup/memory", 2**63 - 4096, 20 * GIB, version=1)
    assert host_memory(root) == Memory(4 * GIB, 7 * GIB // 2)


def test_a_group_that_is_mounted_as_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/docker/abc")
    limited(root / "sys/fs/cgroup/memory", 4 * GIB, GIB, version=1)
    assert host_memory(root) == Memory(4 * GIB, 3 * GIB)


def test_never_more_than_the_machine_has_free(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/", free=GIB)
    limited(root / "sys/fs/cgroup", 8 * GIB, 9 * GIB)
    assert host_memory(root) == Memory(8 * GIB, 0)
    limited(root / "sys/fs/cgroup", 8 * GIB, 2 * GIB)
    assert host_memory(root) == Memory(8 * GIB, GIB)


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --kv-gib"):
        host_memory(tmp_path)


def test_this_machine() -> None:
    memory = host_memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_a_peak_is_seen_although_it_is_over() -> None:
    def run() -> None:
        large = bytearray(200 * MIB)
        large[::4096] = b"1" * len(large[::4096])

    assert 190 * MIB < peak_bytes(run) < 300 * MIB
    assert peak_bytes(lambda: None) < 20 * MIB
