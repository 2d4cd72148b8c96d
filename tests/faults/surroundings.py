"""The project's own suites on machines that lack something: shared memory, a plain folder name, a home to write in.

Mounts are made in a namespace of their own (unshare), which ends with the suite.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.row import Row, Wanted
from tools import ROOT, comfy_source

SUITES = ("unit", "group", "comfy")
FOLDER = "custom-nodes.pack v2"
HOURS = 3 * 3600
# What of /dev a process needs, without shm.
_DEVICES = "for n in null zero full random urandom tty; do touch $d/$n; mount --bind /dev/$n $d/$n; done"
MOUNTS = {
    "small shm": "mount -t tmpfs -o size=64m tmpfs /dev/shm",
    "no shm": f"d=$(mktemp -d) && mount -t tmpfs tmpfs $d && {_DEVICES} && mkdir $d/pts && "
    "mount --rbind /dev/pts $d/pts && ln -s /proc/self/fd $d/fd && mount --rbind $d /dev && ! test -e /dev/shm",
    "home read only": 'mkdir -p "$HOME" && mount -t tmpfs -o ro tmpfs "$HOME" && ! touch "$HOME/x" 2>/dev/null',
}
# Two at a time, which have nothing to do with each other: each costs as long as all suites.
SURROUNDINGS = (("small shm", "odd folder"), ("no shm", "home read only"))


def rows(wanted: Wanted, select: str = "") -> Iterator[Row]:
    """`select` are pytest's own arguments to run a part of each suite."""
    for names in SURROUNDINGS:
        for suite in SUITES:
            if wanted(", ".join(names), suite, None):
                with tempfile.TemporaryDirectory(prefix="sharded-surroundings-") as place:
                    yield _row(names, suite, shlex.split(select), Path(place))


def _row(names: tuple[str, ...], suite: str, select: list[str], place: Path) -> Row:
    root = _copy(place / FOLDER) if "odd folder" in names else ROOT
    command = [sys.executable, "-m", "pytest", f"tests/{suite}", "-q", "-m", "not slow", *select]
    command += ["-p", "no:cacheprovider", f"--basetemp={place / 'base'}"]
    if suite == "unit":  # the others need all cores to themselves
        command += ["-n", "2", "--dist", "loadfile"]
    environment = {**os.environ, "COMFYUI_PATH": str(comfy_source.obtain())}
    if "home read only" in names:
        environment["HOME"] = str(place / "home")
    mounts = " && ".join(MOUNTS[name] for name in names if name in MOUNTS)
    script = f"{{ {mounts}; }} || exit 97; exec {shlex.join(command)}"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=HOURS, check=False
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    told = "; ".join([*failed[:5], *lines[-1:]])
    if done.returncode == 97 or "unshare" in told:
        told = f"this machine forbids the mount: {told}"
    seconds = time.monotonic() - start
    return Row(", ".join(names), suite, None, done.returncode == 0, seconds, told[:600])


def _copy(place: Path) -> Path:
    """The pack as somebody might have unpacked it: what is published, under another name, with the same packages."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    (place / ".venv").symlink_to(Path(sys.prefix))
    return place
