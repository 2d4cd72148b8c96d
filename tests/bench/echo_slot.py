"""A slot without weights, whose transformer answers with the latent it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runtime.engine.denoiser import DenoiserSlot


class Echo(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        return (hidden_states,)


class EchoSlot(DenoiserSlot):
    def _load(self, *_: Any) -> None:
        torch.set_num_threads(1)  # others want the cores too, and two threads that wait for each other spin
        # An Echo has none of the modules that a call may replace, and needs none.
        self.substitutions.paths = set(self.model.replaced)
        self.context_rank = 0
        self.transformer = Echo()
