"""The agent: torchrun's own main, in a process that ends with its host. Run by `launch` with torchrun's arguments.

    python -m runtime.agent <private directory> --owner=<host> <torchrun's options> --module runtime.worker ...

A rank sees its host's end as a closed socket, but only once it has dialled, and only while it runs: one that is
stopped, or sits in native code, sees nothing. So the agent watches too, and ends all of them by force. Its standard
input is a pipe whose other end only the host has; and it looks whether the host lives, for a child that another pack
has forked from the host may keep that end open.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from . import leftovers

LOOK_SECONDS = 1.0  # between two looks at the host
END_SECONDS = 2.0  # how long the ranks may take to be gone, before the directory is removed anyhow


def main() -> None:
    directory, owner, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    host = leftovers.Host.of_mark(owner)
    if host is None:
        raise SystemExit(f"'{owner}' names no host.")
    _take_name()
    gone = threading.Event()
    watch = threading.Thread(target=_watch, args=(host, directory, gone), name="host-watch", daemon=True)
    watch.start()
    from torch.distributed.run import main as torchrun  # seconds, in which the host may end

    try:
        torchrun(arguments)
    finally:
        # Without its ranks torchrun ends too, and would cut short what the watch is doing.
        if gone.is_set():
            watch.join()


def _watch(host: leftovers.Host, directory: Path, gone: threading.Event) -> None:
    while host.lives:
        ready, _, _ = select.select([0], [], [], LOOK_SECONDS)
        if ready and not os.read(0, 1):
            break
    gone.set()
    _end(directory)


def _end(directory: Path) -> NoReturn:
    """End every rank and what the group left on disk, then this process."""
    deadline = time.monotonic() + END_SECONDS
    while (running := _running()) and time.monotonic() < deadline:
        for one in running:
            leftovers.end(one)
        time.sleep(0.02)
    leftovers.remove_directory(directory)
    _take_name()  # torchrun has another; by this one a successor of the host knows what is left of this process
    os._exit(1)


def _running() -> list[leftovers.ProcessState]:
    """This process's descendants that have not ended."""
    found = map(leftovers.process_state, leftovers.descendants(os.getpid()))
    return [one for one in found if one is not None and not one.ended]


def _take_name() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(leftovers.AGENT_NAME)


if __name__ == "__main__":
    main()
