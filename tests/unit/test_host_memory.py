"""Host RAM where a container has less than the machine: what the kernel's files say, and what they do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from runtime import healing, host_memory
from runtime.spec import in_gigabytes, readable_bytes

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GB with 32 GB to take, and a folder for what its kernel says of the container."""
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    memory = SimpleNamespace(total=64 * GIB, available=32 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path


def contain(folder: Path, limit: object, used: int = 0, files: int = 0) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {files}\nslab 9\n")


def test_a_container_can_take_what_its_limit_leaves_and_what_it_only_keeps_of_files(cgroup: Path) -> None:
    contain(cgroup, 16 * GIB, used=10 * GIB, files=4 * GIB)
    found = host_memory.host_memory()
    assert (found.machine, found.room) == ((64 * GIB, 32 * GIB), (16 * GIB, 10 * GIB))
    assert healing.host_memory_now() == "Host RAM now: 10.0 GB of 16.0 GB can be taken."


def test_a_container_cannot_take_what_the_machine_has_not(cgroup: Path) -> None:
    contain(cgroup, 60 * GIB)
    assert host_memory.host_memory().room == (60 * GIB, 32 * GIB)


def test_a_container_above_its_limit_can_take_nothing(cgroup: Path) -> None:
    contain(cgroup, GIB, used=2 * GIB)
    assert host_memory.host_memory().room == (GIB, 0)


@pytest.mark.parametrize("limit", ["max", 64 * GIB, 1 << 62, "", None])
def test_without_a_limit_it_is_the_machines(cgroup: Path, limit: object) -> None:
    if limit is not None:
        contain(cgroup, limit)
    found = host_memory.host_memory()
    assert found.container is None
    assert found.room == found.machine == (64 * GIB, 32 * GIB)


def test_sizes_in_words() -> None:
    assert [in_gigabytes(size) for size in (0, GIB // 2, 3 * GIB)] == ["0.0 GB", "0.5 GB", "3.0 GB"]
    assert [readable_bytes(size) for size in (3 << 19, GIB - 1, GIB)] == ["1.5 MB", "1024.0 MB", "1.0 GB"]
