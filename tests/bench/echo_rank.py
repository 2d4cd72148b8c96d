"""One rank of the native benchmark: a real rank whose transformers answer with the latent they are given.

Run by torchrun in the place of `runtime.worker`. Tensors arrive, are kept and go back as on any rank; nothing is
computed and no weight is read.
"""

from __future__ import annotations

from typing import Any

from runtime import worker
from runtime.spec import Load


class EchoWorker(worker.Worker):
    def _new_slot(self, request: Load) -> Any:
        # Imported late, as the real one does: a rank dials before it imports torch.
        from tests.bench.echo_slot import EchoSlot

        return EchoSlot(request.model, request.parallel, self.backend)


if __name__ == "__main__":
    worker.Worker = EchoWorker  # type: ignore[misc]
    worker.main()
