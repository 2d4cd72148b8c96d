"""Context plans of the video families: upstream's where they are right, ours elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from .plan import ContextPlan, Cut, joint

_PICTURE = Cut(1, "picture")

_WAN = ContextPlan(
    inputs={
        "": {"timestep": Cut(1, "picture", ndim=2)},  # of Wan 2.2's 5B model, one for each token
        "blocks.0": {"hidden_states": _PICTURE},
    },
    outputs={"rope": {0: _PICTURE, 1: _PICTURE}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"blocks.*.attn1": joint("picture")},
    whole=("blocks.*.attn2",),
)

PLANS: Mapping[str, ContextPlan] = {
    "WanTransformer3DModel": _WAN,
}
