"""The only module that starts a process: torchrun's own module, in a session of its own, with one worker per device.

    host (ComfyUI) ── launch ──> agent: python -m torch.distributed.run      own session, own process group
                                   ├── rank 0: python -m runtime.worker      own session each (torchrun does that)
                                   └── rank 1 ...

What can break: the agent dies before its ranks dial (its log is in the error); a rank dies (its socket closes at
once, torchrun ends the others); the host dies (every rank sees its socket close and exits, then the agent follows).
The elastic agent gives its workers 30 s after a SIGTERM, so nothing here waits for it: `kill` ends all of them by
their process descriptors, which cannot hit a stranger that was given the same pid.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from . import environment
from .spec import Device, GroupFile

PACK = Path(__file__).resolve().parent.parent
GROUP_FILE = "group.json"
WORKER = "runtime.worker"  # the module that every rank runs


def private_directory() -> Path:
    """A new directory that only this user can enter: socket, token, rendezvous file and logs of one group."""
    for parent in environment.runtime_directories():
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="comfyui-sharded-", dir=parent))
    return Path(tempfile.mkdtemp(prefix="comfyui-sharded-"))


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


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


class Processes:
    """The agent and, once they have said who they are, its ranks."""

    def __init__(self, directory: Path, address: str, token: str, devices: tuple[Device, ...]):
        self.directory = directory
        file = directory / GROUP_FILE
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(GroupFile(address=address, token=token, devices=devices)))
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1", f"--nproc-per-node={len(devices)}", "--max-restarts=0"),
            # File rendezvous: with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 this leaves no listener but loopback.
            *(
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={directory / 'rendezvous'}",
                "--rdzv-conf=store_type=file",
            ),
            f"--rdzv-id={secrets.token_hex(8)}",
            *("--module", WORKER, str(directory)),
        ]
        with agent_log(directory).open("wb") as log:
            self._agent = subprocess.Popen(
                command,
                cwd=PACK,  # the module is found there, whatever the pack's folder is called
                env=environment.group_environment(devices),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._ranks: dict[int, int] = {}  # pid -> process descriptor

    def watch(self, pid: int) -> None:
        """Remember a rank that has dialled in."""
        with contextlib.suppress(OSError, AttributeError):
            self._ranks[pid] = os.pidfd_open(pid)

    def agent_ended(self) -> int | None:
        """The agent's exit status, or None while it runs."""
        return self._agent.poll()

    @property
    def agent_pid(self) -> int:
        return self._agent.pid

    def kill(self) -> None:
        """End the agent and every rank now, and reap the agent. Idempotent."""
        for descriptor in self._ranks.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._ranks.clear()
        with contextlib.suppress(OSError):
            os.killpg(self._agent.pid, signal.SIGKILL)
        self._agent.wait()
