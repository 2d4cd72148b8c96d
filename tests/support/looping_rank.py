"""A real rank that can be made to loop for ever: rank 1 does so at the next block while a file lies in its directory.

Run by torchrun in the place of `runtime.worker`. It never returns to the engine, while its other threads live on: what
a bug in a model's code, or a driver that never answers, looks like from outside.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runtime import environment, worker
from runtime.engine.pulse import Pulse

LOOP = "loop"  # the file


class LoopingPulse(Pulse):
    def block_finished(self, *_: object) -> None:
        super().block_finished()
        while environment.rank_environment().rank == 1 and (Path(sys.argv[1]) / LOOP).exists():
            pass


if __name__ == "__main__":
    worker.Pulse = LoopingPulse  # type: ignore[misc]
    worker.main()
