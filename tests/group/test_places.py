"""Machines as people have them: links that do not work, little shared memory, odd folders, groups side by side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime import launch, machine
from runtime.devices import cpu_devices
from runtime.group import GROUPS, WorkerGroup
from runtime.machine import AS_IT_IS, SETTINGS
from runtime.spec import RankError
from tools import ROOT

ECHO = torch.arange(5, dtype=torch.uint8)


def answers(group: WorkerGroup) -> bool:
    return torch.equal(group.ping({"x": ECHO})["x"], 255 - ECHO)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    GROUPS.close_all()


# ---- links that do not work


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """CPU ranks that stand for cards without working peer access; what is remembered goes to a place of its own."""
    monkeypatch.setattr(launch, "WORKER", "tests.support.broken_links")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("hang", "all_to_all of 4096 bytes did not end within 3 s", marks=pytest.mark.slow),
        ("wrong", "all_to_all of 4096 bytes brought wrong numbers"),
        pytest.param(
            "fail", "all_to_all of 4096 bytes failed: RuntimeError: NCCL error", marks=pytest.mark.slow
        ),
    ],
)
def test_broken_links_are_found_and_the_setting_that_works_is_taken(
    broken: pytest.MonkeyPatch, how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken.setenv("BROKEN_LINKS", how)
    broken.setattr(machine, "settings", lambda devices: SETTINGS)
    group = GROUPS.group(cpu_devices(2))
    group.start()
    assert answers(group)
    assert said in caplog.text
    assert "without peer access (NCCL_P2P_DISABLE=1)" in caplog.text
    assert [entry.setting for entry in machine.recall().entries] == [SETTINGS[1].name]


@pytest.mark.slow
def test_where_no_other_setting_exists_the_error_says_what_is_broken(broken: pytest.MonkeyPatch) -> None:
    broken.setenv("BROKEN_LINKS", "hang")
    assert machine.settings(cpu_devices(2)) == (AS_IT_IS,)
    group = GROUPS.group(cpu_devices(2))
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"(?s)all_to_all of 4096 bytes did not end.*broken_links\.py"
    ) as caught:
        group.start()
    assert time.monotonic() - start < 30
    assert caught.value.kind == machine.BROKEN
    assert not group.alive


# ---- side by side


@pytest.mark.slow
def test_two_groups_on_different_devices_run_at_once() -> None:
    first, second = (GROUPS.group((device,)) for device in cpu_devices(2))
    first.start()
    second.start()
    assert answers(first) and answers(second)
    assert first.alive and second.alive
    kept = second.snapshot()["ranks"][0]["pid"]
    first.close()
    assert answers(second)
    assert answers(first)
    assert second.snapshot()["ranks"][0]["pid"] == kept


# ---- places

RUN = (
    "import os; from runtime.group import WorkerGroup; from runtime.devices import cpu_devices; import torch\n"
    "assert os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize <= 64 << 20\n"
    "group = WorkerGroup(cpu_devices(2)); group.start(); sent = torch.arange(100 << 20, dtype=torch.uint8)\n"
    "print(torch.equal(group.ping({'x': sent})['x'], 255 - sent)); group.close()"
)
SHARED = {
    "64 MB": "mount -t tmpfs -o size=64m tmpfs /dev/shm",
    # A file system in which nothing can be made, in the place of what the system has.
    "none": "mount -t tmpfs -o size=4k,ro tmpfs /dev/shm",
}


def _may_mount() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(
            ["unshare", "-rm", "sh", "-c", SHARED["64 MB"]], capture_output=True
        ).returncode
    )


@pytest.mark.parametrize("shared", [pytest.param("64 MB", marks=pytest.mark.slow), "none"])
def test_little_shared_memory_an_odd_folder_and_no_home(shared: str, tmp_path: Path) -> None:
    """100 MB go to the ranks and back."""
    if not _may_mount():
        pytest.skip("this machine allows no mount namespace")
    pack = tmp_path / "custom-nodes.pack v2"
    shutil.copytree(ROOT / "runtime", pack / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{SHARED[shared]} && exec "$0" "$@"', sys.executable, "-c", RUN],
        cwd=pack,
        env=environment | {"HOME": "/proc/nobody"},  # cannot be made, not even by root
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "True", done.stderr
