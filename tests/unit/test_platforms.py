"""Where groups cannot run yet, the host half still imports and says so in one sentence.

Windows and macOS cannot be had here: a process that hides what they lack stands in for them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools import ROOT

PRETEND = """
import os, signal, socket, sys
sys.platform = {platform!r}
sys.modules["fcntl"] = None
for module, names in ((os, ("memfd_create", "pidfd_open", "killpg")), (signal, ("pidfd_send_signal",))):
    for name in names:
        delattr(module, name)
if {platform!r} == "win32":
    del socket.AF_UNIX, socket.send_fds, socket.recv_fds
from runtime import planner
from runtime.devices import cpu_devices
from runtime.group import GROUPS
from runtime.spec import Refusal
group = GROUPS.group(cpu_devices(2))
print(GROUPS.snapshot()[0]["phase"])
try:
    group.start()
except Refusal as refusal:
    print(refusal)
"""


@pytest.mark.parametrize(("platform", "name"), [("win32", "Windows"), ("darwin", "macOS")])
def test_the_pack_imports_and_says_what_it_cannot_do(platform: str, name: str) -> None:
    code = PRETEND.format(platform=platform)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    phase, what, why, instead = done.stdout.strip().splitlines()
    assert phase == "stopped"
    assert what == f"Groups of ranks run on Linux only today; this is {name}."
    assert why and instead
