"""Where each transformer is cut along its sequences: upstream's plans where they are right, ours elsewhere."""

from __future__ import annotations

from torch import nn

from ...spec import Refusal
from . import image, video
from .plan import Attends, Change, ContextPlan, Count, Cut, Whole

__all__ = ["CONTEXT_PLANS", "Attends", "Change", "ContextPlan", "Count", "Cut", "Whole", "context_plan"]

CONTEXT_PLANS = {**image.PLANS, **video.PLANS}


def context_plan(model: nn.Module) -> ContextPlan:
    """The plan of a model's class. Raises Refusal for a class without one."""
    name = type(model).__name__
    if name not in CONTEXT_PLANS:
        raise Refusal(
            f"{name} cannot run with its sequence divided.",
            "There is no context plan for it: its attention would see one rank's tokens only.",
            "Works instead: tensor.",
        )
    return CONTEXT_PLANS[name]
