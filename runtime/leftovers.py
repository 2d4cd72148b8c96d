"""What an earlier host left behind: found at the start of a group, and removed where it is provably ours and dead.

    directory   of this user and entered by nobody else, with our owner file in it, not locked by a living host
    process     of this user, in this pid namespace, started by our command, which names a host that is gone
    zombie      an agent that an earlier program of this very process started, before it replaced itself (os.execv)

A host is a pid together with the moment at which that process started: a pid alone is given away again. Whatever is
in doubt stays, so that two hosts of one user never touch each other's groups.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

try:
    import fcntl
except ImportError:  # Windows, where no group ever starts
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("comfyui-sharded")

PREFIX = "comfyui-sharded-"  # of every private directory
OWNER_FILE = "owner.json"
_REMOVED = ".removed"  # ends the name of one that is being removed
AGENT = "runtime.agent"
MARK = "--owner="  # by this argument a process of a group is known
AGENT_NAME = "sharded-agent"  # as the kernel has it, also of a zombie: at most 15 bytes
_PROC = Path("/proc")
_EXITING = 0x4  # PF_EXITING in include/linux/sched.h
_KILLED = 1 << (signal.SIGKILL - 1) if hasattr(signal, "SIGKILL") else 0
_FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux' proc_ns.h


class Host(msgspec.Struct, frozen=True):
    """A process that owns a group. `started` is in clock ticks since boot, as the kernel tells it."""

    pid: int
    started: int

    @property
    def mark(self) -> str:
        """The argument by which every process of its groups says whose it is."""
        return f"{MARK}{self.pid}:{self.started}"

    @classmethod
    def of_mark(cls, argument: str) -> Host | None:
        pid, _, started = argument.removeprefix(MARK).partition(":")
        if argument.startswith(MARK) and pid.isdecimal() and started.isdecimal():
            return cls(int(pid), int(started))
        return None

    @property
    def lives(self) -> bool:
        """Whether this very process runs. A zombie has ended, whoever fails to reap it."""
        found = process_state(self.pid)
        if found is None and not tells_processes():
            return True  # a system that does not tell; nothing is dead for certain
        return found is not None and found.started == self.started and not found.ended


class ProcessState(msgspec.Struct, frozen=True):
    """What the kernel tells of a process: `state` is a letter (T is stopped, Z a zombie)."""

    pid: int
    name: str
    state: str
    parent: int
    started: int
    ending: bool = False  # it has ended, is on its way out, or a SIGKILL is waiting for it

    @property
    def runs(self) -> bool:
        """Whether this very process still runs."""
        now = process_state(self.pid)
        return now is not None and now.started == self.started and not now.ended

    @property
    def ended(self) -> bool:
        """Whether it had ended, and only its parent had not asked for its exit status."""
        return self.state in "ZX"


class Owner(msgspec.Struct, frozen=True):
    """What a private directory says of its host. `machine` is the boot and the pid namespace its pid counts in."""

    host: Host
    machine: str
    locked: bool


def process_state(pid: int) -> ProcessState | None:
    """The state of a process, None if there is none (or this system does not tell)."""
    try:
        return read_state(pid)
    except OSError:
        return None


def tells_processes() -> bool:
    """Whether this system tells anything of processes."""
    return (_PROC / "self/stat").exists()


def read_state(pid: int) -> ProcessState | None:
    """As `process_state`; raises OSError where the answer could not be read, which says nothing of the process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may hold anything, also parentheses.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    name = head.partition("(")[2]
    # Fields 9 (flags) and 31 (pending signals) of proc_pid_stat(5), counted from 1 with the state as the third.
    dying = len(fields) > 28 and bool(int(fields[6]) & _EXITING or int(fields[28]) & _KILLED)
    return ProcessState(
        pid,
        name,
        state=fields[0],
        parent=int(fields[1]),
        started=int(fields[19]),
        ending=fields[0] in "ZX" or dying,
    )


def this_host() -> Host:
    """This process as an owner of groups."""
    own = process_state(os.getpid())
    return Host(os.getpid(), own.started if own else 0)


def descendants(pid: int) -> list[int]:
    """All processes that descend from `pid`, also those that have left its session; parents first."""
    children: dict[int, list[int]] = {}
    for one in _processes():
        children.setdefault(one.parent, []).append(one.pid)
    found, unseen = [], [pid]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def sees_all_processes() -> bool:
    """Whether the pids of this process are the machine's own, not those of a container."""
    try:
        return os.readlink(_PROC / "self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def of_group(directory: Path, host: Host) -> list[int]:
    """The processes of this host's group with this private directory, wherever their parent has gone."""
    return [one.pid for one in _processes() if {str(directory), host.mark} <= set(_words(one.pid))]


def end(one: ProcessState) -> None:
    """Kill this process and no other that was given its pid since. One that has ended is no error."""
    send(one, signal.SIGKILL)


def send(one: ProcessState, number: int) -> None:
    """Send a signal to this process and no other that was given its pid since. One that has ended is no error."""
    with contextlib.suppress(OSError):
        try:
            descriptor = os.pidfd_open(one.pid)
        except (AttributeError, OSError):  # a kernel before 5.3; if it has ended, the next line sees it
            if one.runs:
                os.kill(one.pid, number)
            return
        try:
            if one.runs:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _words(pid: int) -> list[str]:
    """The command line of a process, [] where it has none or is not ours to look at."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return []


# ---- whose a directory is


def claim(directory: Path) -> int | None:
    """Mark a new private directory as this host's; the descriptor that keeps it so until it is closed.

    The lock goes with the process, however it ends, and with a program that replaces it. It also keeps cleaners of
    /tmp away, which pass over a locked directory (systemd-tmpfiles does). None on a file system without locks.
    """
    descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    locked = _lock(descriptor)
    owner = Owner(this_host(), _machine(), locked)
    place = os.open(directory / OWNER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(place, "wb") as file:
        file.write(msgspec.json.encode(owner))
    if locked:
        return descriptor
    os.close(descriptor)
    return None


def is_left_behind(directory: Path) -> bool:
    """Whether a directory is a private one of this user's whose host is gone for certain."""
    try:
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return False
        owner = msgspec.json.decode((directory / OWNER_FILE).read_bytes(), type=Owner)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, msgspec.DecodeError):
        return False
    try:
        if os.fstat(descriptor).st_ino != status.st_ino:
            return False
        # Another container counts pids of its own, and another machine may share the folder: there only the lock tells.
        if owner.machine == _machine() and owner.host.lives:
            return False
        return _lock(descriptor) if owner.locked else owner.machine == _machine()
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _machine() -> str:
    """What a pid is unique in: this boot, and this namespace of pids."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append((_PROC / "sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink(_PROC / "self/ns/pid"))
    return " ".join(parts)


# ---- finding and removing


def left_processes() -> list[ProcessState]:
    """Processes of groups whose host is gone: agents and ranks of this user, visible under the pids they know."""
    return [one for one in _processes() if _is_left(one)]


def _is_left(one: ProcessState) -> bool:
    place = _PROC / str(one.pid)
    try:
        words = _words(one.pid)
        hosts = [host for word in words if (host := Host.of_mark(word))]
        if not hosts or "-m" not in words or not any(_is_private(word) for word in words):
            return False
        if place.stat().st_uid != os.geteuid() or one.ended:
            return False
        if os.readlink(place / "ns/pid") != os.readlink(_PROC / "self/ns/pid"):
            return False
    except OSError:  # it has ended meanwhile, or is not ours to look at
        return False
    return not hosts[0].lives


def _is_private(word: str) -> bool:
    return os.path.isabs(word) and os.path.basename(word).startswith(PREFIX)


def remove(parents: Iterable[Path]) -> None:
    """Remove what dead hosts have left in `parents` and among the processes of this machine. Never raises OSError."""
    for one in left_processes():
        log.warning("Ended process %d, left behind by a ComfyUI that is gone.", one.pid)
        end(one)
    _reap_agents()
    for parent in {path.resolve() for path in parents}:
        for directory in _listed(parent):
            if is_left_behind(directory):
                log.warning("Removed %s, left behind by a ComfyUI that is gone.", directory)
                remove_directory(directory)


def remove_directory(directory: Path) -> None:
    """Remove a private directory, also while a process that is just ending writes into it. Never raises OSError."""
    gone = directory.with_name(directory.name + _REMOVED)
    # By another name first: torchrun writes its rendezvous file from a thread of its own, would make it anew behind
    # whoever removes it, and so keep the directory, without the file that says whose it was.
    with contextlib.suppress(OSError):
        directory.rename(gone)
    for path in (gone, directory):
        shutil.rmtree(path, ignore_errors=True)


def _listed(parent: Path) -> list[Path]:
    try:
        return sorted(parent.glob(PREFIX + "*"))
    except OSError:
        return []


def _reap_agents() -> None:
    """Take the exit status of agents that this process started before it replaced its own program.

    Nobody else asks for it: the objects that knew of them went with that program.
    """
    for one in _processes():
        if (one.parent, one.name) == (os.getpid(), AGENT_NAME) and one.ended and one.started < _LOADED:
            with contextlib.suppress(OSError):
                os.waitpid(one.pid, os.WNOHANG)


def _processes() -> Iterator[ProcessState]:
    try:
        names = os.listdir(_PROC)
    except OSError:
        return
    for name in names:
        if name.isdecimal() and (one := process_state(int(name))) is not None:
            yield one


def _ticks_since_boot() -> int:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


_LOADED = _ticks_since_boot()  # no process of an earlier program started after this
