"""The only module that starts a process: torchrun's own main, in a session of its own, with one worker per device.

    host (ComfyUI) ── launch ──> agent: python -m runtime.agent (torchrun)   own session, own process group
                                   ├── rank 0: python -m runtime.worker      own session each (torchrun does that)
                                   └── rank 1 ...

What can break: the agent dies before its ranks dial (its log is in the error); a rank dies (its socket closes at
once, torchrun ends the others); the host dies (every rank sees its socket close and exits, and the agent, which
watches the host, ends those that do not); all of them are stopped while the host dies (the next start of a group ends
them, see `leftovers`). The elastic agent gives its workers 30 s after a SIGTERM, so nothing here waits for it: `kill`
ends all of them at once, each known by its pid and the moment at which it started: no stranger is hit that was given
the same pid.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from . import environment, leftovers
from .spec import Device, GroupFile

log = logging.getLogger("comfyui-sharded")

PACK = Path(__file__).resolve().parent.parent
GROUP_FILE = "group.json"
WORKER = "runtime.worker"  # the module that every rank runs
END_SECONDS = 5.0  # which a killed process may take to be gone: one on a card frees its memory first


def private_directory() -> Path:
    """A new directory that only this user can enter: socket, token, rendezvous file and logs of one group."""
    for parent in environment.runtime_directories():
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=leftovers.PREFIX, dir=parent))
    return Path(tempfile.mkdtemp(prefix=leftovers.PREFIX))


def rank_log(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def agent_log(directory: Path) -> Path:
    return directory / "agent.log"


def log_tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log, empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def pack_version() -> str:
    """The pack is a folder and no installed package: its project file says. "" without one."""
    with contextlib.suppress(OSError):
        for line in (PACK / "pyproject.toml").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "version":
                return value.strip().strip('"')
    return ""


class Processes:
    """The agent and, once they have said who they are, its ranks."""

    def __init__(
        self,
        directory: Path,
        address: str,
        token: str,
        devices: tuple[Device, ...],
        variables: Mapping[str, str] | None = None,
    ):
        """`variables` are those of the ranks' environment that this machine needs (see `machine`)."""
        leftovers.remove([*environment.runtime_directories(), Path(tempfile.gettempdir())])
        self.directory = directory
        self._ranks: set[leftovers.ProcessState] = set()  # as they were when they came
        self._claim = leftovers.claim(directory)
        try:
            self._agent = self._start(address, token, devices, variables or {})
        except BaseException:
            self._release_claim()
            raise

    def _start(
        self, address: str, token: str, devices: tuple[Device, ...], variables: Mapping[str, str]
    ) -> subprocess.Popen:
        file = self.directory / GROUP_FILE
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(GroupFile(address=address, token=token, devices=devices)))
        # For the ranks too: whoever finds one later sees whose it was.
        ours = (str(self.directory), leftovers.this_host().mark)
        command = [
            *(sys.executable, "-m", leftovers.AGENT, *ours),
            *("--nnodes=1", f"--nproc-per-node={len(devices)}", "--max-restarts=0"),
            # File rendezvous: with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 this leaves no listener but loopback.
            *(
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={self.directory / 'rendezvous'}",
                "--rdzv-conf=store_type=file",
            ),
            f"--rdzv-id={secrets.token_hex(8)}",
            # It would make a folder in the temporary directory, and leave it there when it is killed.
            f"--log-dir={self.directory / 'torchrun'}",
            *("--module", WORKER, *ours),
        ]
        with agent_log(self.directory).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=PACK,  # the module is found there, whatever the pack's folder is called
                env=environment.group_environment(devices, variables),
                stdin=subprocess.PIPE,  # nothing is ever written: it closes when the host ends
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def watch(self, pid: int) -> None:
        """Remember a rank that has dialled in."""
        if (found := leftovers.process_state(pid)) is not None:
            self._ranks.add(found)

    def abandon(self) -> None:
        """In a process that was forked from the host: close its copies of what only the host may hold."""
        if self._agent.stdin is not None:
            self._agent.stdin.close()
        self._release_claim()

    def signal_ranks(self, *numbers: int) -> None:
        """Send signals to every rank that has dialled in."""
        for one in list(self._ranks):
            for number in numbers:
                leftovers.send(one, number)

    def agent_ended(self) -> int | None:
        """The agent's exit status, or None while it runs."""
        return self._agent.poll()

    @property
    def agent_pid(self) -> int:
        return self._agent.pid

    def kill(self) -> None:
        """End the agent and every rank now, wait until they are gone, and reap the agent. Idempotent."""
        # Also those that have not dialled yet, and what a rank has started.
        below = leftovers.descendants(self._agent.pid) if self._agent.poll() is None else []
        for pid in (*below, *leftovers.of_group(self.directory, leftovers.this_host())):
            self.watch(pid)
        self._agent.kill()
        deadline = time.monotonic() + END_SECONDS
        while running := [one for one in list(self._ranks) if one.runs]:
            for one in running:
                leftovers.end(one)
            if time.monotonic() > deadline:
                log.warning("Processes %s do not end.", ", ".join(str(one.pid) for one in running))
                break
            time.sleep(0.005)
        self._ranks.clear()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
            self._agent.wait(END_SECONDS)
        if self._agent.stdin is not None:
            self._agent.stdin.close()
        self._release_claim()

    def _release_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            os.close(claim)
