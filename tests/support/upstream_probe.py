"""What upstream's context parallelism gets wrong, and ours beside it on the same models and inputs. Run by torchrun.

Every rank emits a row for each probe of as many ranks as there are: `upstream` and `ours` are how far each is from
one process (max_rel), or the text of the error that it raised. Rows of `memory` hold peaks of a ring of all ranks.
"""

from __future__ import annotations

import copy
import datetime
import faulthandler
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from runtime.engine.attention import ContextAxes, Tokens, context_attention, cut_lengths
from runtime.engine.context import divide_sequence
from runtime.engine.mesh import build_mesh
from runtime.spec import ParallelSpec
from tests.support import upstream
from tests.support.allocated import peak_bytes, unfilled
from tests.support.models import randomise
from tests.support.reference import max_rel
from tests.support.torchrun import emit

BATCH, HEADS, WIDTH, TEXT_WIDTH = 2, 4, 12, 20
LOCAL = (1, 256, 8, 64)  # of a rank, for memory: batch, tokens, heads, width
STUCK_AFTER = 30  # seconds: a fault that only one rank sees would leave the others waiting
Inputs = dict[str, Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def padded(tokens: int) -> torch.Tensor:
    """[BATCH, tokens]: two prompts of different length, neither of which fills it."""
    return torch.arange(tokens) < torch.tensor([[tokens // 2], [tokens - 2]])


# ---- models and inputs


def flux(heads: int = HEADS) -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=2,
        num_attention_heads=heads,
        attention_head_dim=WIDTH,
        axes_dims_rope=(4, 4, 4),
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=16,
    )


def flux_inputs(picture: int = 16, text: int = 8) -> Inputs:
    places = torch.zeros(picture, 3)
    places[:, 1], places[:, 2] = torch.arange(picture) // 4, torch.arange(picture) % 4
    return {
        "hidden_states": normal(BATCH, picture, 8),
        "encoder_hidden_states": normal(BATCH, text, TEXT_WIDTH),
        "pooled_projections": normal(BATCH, 16),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": places,
        "txt_ids": torch.zeros(text, 3),
    }


def qwen() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=8,
        out_channels=2,
        num_layers=2,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        axes_dims_rope=(4, 4, 4),
        joint_attention_dim=TEXT_WIDTH,
    )


def qwen_inputs(picture: int = 16, text: int = 8, mask: bool = True) -> Inputs:
    return {
        "hidden_states": normal(BATCH, picture, 8),
        "encoder_hidden_states": normal(BATCH, text, TEXT_WIDTH),
        "encoder_hidden_states_mask": padded(text).long() if mask else None,
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 1, picture)]] * BATCH,
    }


def ltx() -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=6,
        out_channels=6,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        cross_attention_dim=HEADS * WIDTH,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
    )


def ltx_inputs() -> Inputs:
    return {
        "hidden_states": normal(BATCH, 16, 6),
        "encoder_hidden_states": normal(BATCH, 8, TEXT_WIDTH),
        "timestep": torch.tensor([[300.0], [700.0]]),
        "encoder_attention_mask": padded(8).long(),
        "num_frames": 1,
        "height": 4,
        "width": 4,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def ltx2() -> Any:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=6,
        out_channels=6,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        cross_attention_dim=HEADS * WIDTH,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=WIDTH // 2,
        audio_cross_attention_dim=HEADS * WIDTH // 2,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
        rope_type="split",
    )


def ltx2_inputs(mask: bool = True) -> Inputs:
    of_text = {"encoder_attention_mask": padded(8).long(), "audio_encoder_attention_mask": padded(8).long()}
    return {
        "hidden_states": normal(BATCH, 16, 6),
        "audio_hidden_states": normal(BATCH, 6, 8),
        "encoder_hidden_states": normal(BATCH, 8, TEXT_WIDTH),
        "audio_encoder_hidden_states": normal(BATCH, 8, TEXT_WIDTH),
        "timestep": torch.tensor([300.0, 700.0]),
        "num_frames": 1,
        "height": 4,
        "width": 4,
        "audio_num_frames": 6,
        **(of_text if mask else {}),
    }


def helios() -> Any:
    return diffusers.HeliosTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=40,
        num_layers=2,
        rope_dim=(4, 4, 4),
    )


def helios_inputs() -> Inputs:
    inputs: Inputs = {
        "timestep": torch.tensor([300.0, 700.0]),
        "encoder_hidden_states": normal(BATCH, 8, TEXT_WIDTH),
    }
    start = 0
    for term, frames in (("history_long", 4), ("history_mid", 2), ("history_short", 1), ("", 3)):
        name = f"latents_{term}" if term else "hidden_states"
        inputs[name] = normal(BATCH, 4, frames, 4, 4)
        inputs[f"indices_{name}"] = torch.arange(start, start + frames).expand(BATCH, -1)
        start += frames
    return inputs


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        caption_projection_dim=HEADS * WIDTH,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=16,
        pos_embed_max_size=12,
    )


def sd3_inputs() -> Inputs:
    return {
        "hidden_states": normal(BATCH, 4, 8, 8),
        "encoder_hidden_states": normal(BATCH, 8, TEXT_WIDTH),
        "pooled_projections": normal(BATCH, 16),
        "timestep": torch.tensor([300.0, 700.0]),
    }


_CUT = ContextParallelInput(split_dim=1, expected_dims=3)
SD3_PLAN = {
    "transformer_blocks.0": {"hidden_states": _CUT, "encoder_hidden_states": _CUT},
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


# ---- probes


@dataclass(frozen=True)
class Probe:
    """One forward of a model under ours and under upstream's, with what upstream is given to run on a CPU."""

    layout: ParallelSpec
    model: Callable[[], Any]
    inputs: Callable[[], Inputs]
    anything: bool = False
    plan: Any = None
    given: dict[str, bool] = field(default_factory=dict)

    def figures(self) -> dict[str, float | str]:
        torch.manual_seed(0)
        model, mesh, inputs = self.model().eval(), build_mesh(self.layout, "cpu"), self.inputs()
        randomise(model)
        expected = _outputs(model, inputs)

        def upstreams() -> float:
            other = copy.deepcopy(model)
            with upstream.running(**self.given):
                upstream.enable(other, mesh, anything=self.anything, plan=self.plan)
                return _difference(_outputs(other, inputs), expected)

        def ours() -> float:
            divide_sequence(model, mesh)
            return _difference(_outputs(model, inputs), expected)

        return {"upstream": _tried(upstreams), "ours": _tried(ours)}


@dataclass(frozen=True)
class AttentionProbe:
    """Attention alone, with grouped queries."""

    layout: ParallelSpec
    tokens: int = 16

    def figures(self) -> dict[str, float | str]:
        mesh = build_mesh(self.layout, "cpu")
        axes = ContextAxes.of_mesh(mesh)
        query = normal(BATCH, self.tokens, HEADS, WIDTH)
        key, value = (normal(BATCH, self.tokens, HEADS // 2, WIDTH) * scale for scale in (1, 2))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in (query, key, value)), enable_gqa=True
        ).transpose(1, 2)
        lengths = cut_lengths(self.tokens, axes)
        here = slice(sum(lengths[: axes.rank]), sum(lengths[: axes.rank + 1]))
        own = [one[:, here].contiguous() for one in (query, key, value)]
        parallel = upstream.set_up(upstream.config(mesh), mesh)
        tokens = Tokens((lengths,))

        def upstreams() -> float:
            with upstream.running():
                return max_rel(upstream.attention(*own, parallel, enable_gqa=True), expected[:, here])

        def ours() -> float:
            out = context_attention(*own, None, None, queries=tokens, keys=tokens, axes=axes)
            return max_rel(out, expected[:, here])

        return {"upstream": _tried(upstreams), "ours": _tried(ours)}


def _with_residuals(inputs: Inputs, width: int = HEADS * WIDTH) -> Inputs:
    """And those of a ControlNet for the first block."""
    return {**inputs, "controlnet_block_samples": [normal(BATCH, inputs["hidden_states"].shape[1], width)]}


ULYSSES, RING = ParallelSpec(ulysses=2), ParallelSpec(ring=2)
PROBES: dict[int, dict[str, Probe | AttentionProbe]] = {
    2: {
        "ring with a mask": Probe(RING, qwen, qwen_inputs),
        "ring of any length with a mask": Probe(RING, qwen, lambda: qwen_inputs(15, 7), anything=True),
        "LTX with its mask, ulysses": Probe(ULYSSES, ltx, ltx_inputs),
        "LTX with its mask, ring": Probe(RING, ltx, ltx_inputs),
        "LTX-2 with its mask": Probe(ULYSSES, ltx2, ltx2_inputs),
        "LTX-2 without a mask": Probe(ULYSSES, ltx2, lambda: ltx2_inputs(mask=False)),
        "Helios of another depth than 40": Probe(ULYSSES, helios, helios_inputs),
        "residuals of a ControlNet, Flux": Probe(ULYSSES, flux, lambda: _with_residuals(flux_inputs())),
        "residuals of a ControlNet, Qwen-Image": Probe(
            ULYSSES, qwen, lambda: _with_residuals(qwen_inputs(mask=False))
        ),
        "legacy processors": Probe(ULYSSES, sd3, sd3_inputs, plan=SD3_PLAN),
        "a picture that does not divide": Probe(ULYSSES, flux, lambda: flux_inputs(picture=15)),
        "a text that does not divide": Probe(ULYSSES, flux, lambda: flux_inputs(text=7)),
        "heads that do not divide": Probe(ULYSSES, lambda: flux(heads=3), flux_inputs),
        "ring of native attention": Probe(RING, flux, flux_inputs, given={"with_lse": False}),
        "uneven parts gathered by gloo": Probe(
            ULYSSES, flux, lambda: flux_inputs(15, 7), anything=True, given={"uneven_gather": False}
        ),
        "grouped queries, ulysses": AttentionProbe(ULYSSES),
        "grouped queries, ring": AttentionProbe(RING),
    },
    4: {
        "unified with a mask": Probe(ParallelSpec(ulysses=2, ring=2), qwen, qwen_inputs),
        "unified over lengths that do not divide": Probe(
            ParallelSpec(ulysses=2, ring=2), flux, lambda: flux_inputs(15, 7), anything=True
        ),
        "ulysses of any length with a mask": Probe(
            ParallelSpec(ulysses=4), qwen, lambda: qwen_inputs(15, 5), anything=True
        ),
        "text shorter than the ranks": Probe(
            ParallelSpec(ulysses=4), flux, lambda: flux_inputs(15, 3), anything=True
        ),
    },
}


def ring_peaks(dtype: torch.dtype) -> dict[str, float]:
    """What a step of a ring of all ranks allocates at a time, as multiples of this rank's keys."""
    ring = dist.get_world_size()
    mesh = build_mesh(ParallelSpec(ring=ring), "cpu")
    axes, tokens = ContextAxes.of_mesh(mesh), Tokens(((LOCAL[1],) * ring,))
    own = normal(3, *LOCAL).to(dtype).unbind()
    parallel = upstream.set_up(upstream.config(mesh), mesh)
    with unfilled():  # what a ring passes on is real
        ours = peak_bytes(lambda: context_attention(*own, None, None, queries=tokens, keys=tokens, axes=axes))
        upstreams = peak_bytes(upstream.inside(lambda: upstream.attention(*own, parallel)))
    return {"ours": ours / own[0].nbytes, "upstream": upstreams / own[0].nbytes}


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", timeout=datetime.timedelta(seconds=20))
    for fault, probe in PROBES[dist.get_world_size()].items():
        faulthandler.dump_traceback_later(STUCK_AFTER, exit=True)
        emit({"fault": fault, **probe.figures()})
    for dtype in (torch.float32, torch.bfloat16):
        faulthandler.dump_traceback_later(STUCK_AFTER, exit=True)
        emit({"memory": str(dtype), "ranks": dist.get_world_size(), **ring_peaks(dtype)})
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def _tried(compute: Callable[[], float]) -> float | str:
    try:
        return compute()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _outputs(model: Any, inputs: Inputs) -> list[torch.Tensor]:
    found = model(**inputs, return_dict=False)
    return [one for one in found if isinstance(one, torch.Tensor)]


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(max_rel(a, b) for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    main()
