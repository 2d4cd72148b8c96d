"""A real ComfyUI server as a child process: start, wait until it answers, stop, and see what it left behind.

    Server --Popen--> python main.py            (own session: a terminal's Ctrl-C reaches only the caller)
                        `-- whatever the pack starts, found again by descent and by a mark in the environment

Ways to end: `stop` (SIGINT, SIGTERM, SIGKILL in turn) and `kill9`. If the caller dies, the kernel ends the server.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

import psutil

from tools import comfy_source, loopback, processes
from tools.base_directory import BaseDirectory

HOST = "127.0.0.1"
START_SECONDS = 120.0
POLITE_SECONDS = 15.0
PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """The server did not start, died, or could not be stopped; the message ends with the tail of its log."""


class Server:
    """`with Server(base) as server:` runs ComfyUI on `server.url` until the block ends, however it ends."""

    def __init__(
        self,
        base: BaseDirectory,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        echo: bool = False,
    ) -> None:
        """`arguments` are added to ComfyUI's command line, `environment` to the inherited one.

        `echo` leaves the server's output on this terminal instead of in `server.log` of the base directory.
        """
        self.base = base
        self.log = None if echo else base.path / "server.log"
        self.port = 0
        self.left_behind: list[str] = []
        """Command lines of processes that outlived the server and had to be killed."""
        self.start_seconds = 0.0
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._token = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("the server was never started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, port: int = 0) -> None:
        """Start ComfyUI and return once it answers. Raises ServerError after 120 s, or as soon as it dies.

        `port` is for a server that comes back where its clients look for it; by default a free one is taken.
        """
        if self.running:
            raise ServerError("the server is running already")
        began = time.monotonic()
        tree = comfy_source.obtain()
        self.port = port or free_port()
        with _output(self.log) as output:
            self._process = subprocess.Popen(
                self._command(tree),
                cwd=tree,
                env=self._full_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                preexec_fn=_settle_child,
            )
        try:
            self._wait_ready(began + START_SECONDS)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began

    def stop(self, grace: float = 10.0) -> list[str]:
        """End the server, give what it had started `grace` seconds to end too, kill the rest and name it."""
        self._remember()
        process = self._process
        if process is not None and process.poll() is None:
            for sign, seconds in (
                (signal.SIGINT, POLITE_SECONDS),
                (signal.SIGTERM, 5.0),
                (signal.SIGKILL, 10.0),
            ):
                process.send_signal(sign)
                try:
                    process.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    self._remember()
        if self.running:
            raise ServerError(f"process {self.pid} survived SIGKILL")
        self._sweep(grace)
        return self.left_behind

    def kill9(self) -> None:
        """SIGKILL the server alone, as the out-of-memory killer would; what it started is left to notice by itself."""
        self._remember()
        assert self._process is not None, "the server was never started"
        self._process.kill()
        self._process.wait(10)

    def offspring(self) -> list[psutil.Process]:
        """Everything alive that this server has started, whether or not it is still the parent."""
        self._remember()
        return sorted((one for one in self._seen if processes.alive(one)), key=lambda one: one.pid)

    def log_tail(self, lines: int = 60) -> str:
        if self.log is None or not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _command(self, tree: Path) -> list[str]:
        return [
            sys.executable,
            str(tree / "main.py"),
            *(() if has_gpu() else ("--cpu",)),
            *("--listen", HOST, "--port", str(self.port)),
            *("--disable-auto-launch", "--disable-api-nodes"),
            *("--base-directory", str(self.base.path)),
            # By default the database lies in the ComfyUI tree, where two servers would share it.
            *("--database-url", f"sqlite:///{self.base.path / 'user' / 'comfyui.db'}"),
            *self._arguments,
        ]

    def _full_environment(self) -> dict[str, str]:
        fixed = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", processes.MARK: self._token}
        return {**os.environ, **fixed, **self._environment}

    def _wait_ready(self, deadline: float) -> None:
        while True:
            assert self._process is not None
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"ComfyUI ended with {code} while starting\n{self.log_tail()}")
            if _answers(self.url):
                return
            if time.monotonic() > deadline:
                raise ServerError(f"ComfyUI did not answer within {START_SECONDS:g} s\n{self.log_tail()}")
            time.sleep(0.1)

    def _remember(self) -> None:
        """Note what belongs to the server while it can still be told."""
        own = self._process.pid if self._process else 0
        if self.running:
            self._seen.update(processes.descendants(own))
        self._seen.update(one for one in processes.marked(self._token) if one.pid != own)

    def _sweep(self, grace: float) -> None:
        """Wait for the offspring to end by itself; what does not is recorded and killed."""
        left = processes.wait_gone(self.offspring(), grace)
        self.left_behind += [f"{one.pid}: {processes.command_line(one)}" for one in left]
        processes.kill(left)
        processes.wait_gone(left, 5.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@functools.cache
def has_gpu() -> bool:
    """Whether torch sees a GPU; torch is only asked, in its own process, where a GPU driver is there at all."""
    if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return False
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def _output(log: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    """Where the server writes: its log, or None for this terminal."""
    return open(log, "ab") if log else nullcontext()


def _settle_child() -> None:
    """In the child before exec: end with the parent, and let SIGINT work even where the caller's shell ignores it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _answers(url: str) -> bool:
    try:
        return "system" in json.loads(loopback.request(f"{url}/system_stats", timeout=5))
    except (OSError, ValueError):
        return False
