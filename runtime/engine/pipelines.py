"""A diffusers pipeline in a slot: the transformer on every rank, text encoders and VAE on rank 0.

The denoising loop is upstream's own and runs on every rank, from latents of one seeded CPU generator; rank 0 carries
results and progress. Latents at the edges are in VAE space (unpacked, unscaled), as ComfyUI's LATENT; embeddings are
what the pipeline's `encode_prompt` gives, as ComfyUI's CONDITIONING for Flux.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy
import torch
import transformers
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from ..spec import Cancelled, Decode, ModelSpec, ParallelSpec, Progress, Sample, SlotInfo
from .backend import Backend
from .checkpoints.folder import open_folder
from .context import divide_sequence
from .copies import Copies
from .kernels import set_attention
from .loading import SliceRead
from .mesh import build_mesh
from .slots import ByteCounter, HeldSlot, IsCancelled, Report, parameter_bytes
from .transformer import load_transformer, plan_transformer

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

_PATCH = 2  # Flux packs 2x2 latent cells into one token
_TILE = 512  # pixels on a side, as the tiles of ComfyUI's VAE Decode (Tiled)
_NO_COMPONENTS = dict.fromkeys(
    ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
)
_ENCODERS = {"text_encoder": transformers.CLIPTextModel, "text_encoder_2": transformers.T5EncoderModel}
_TOKENIZERS = {"tokenizer": transformers.CLIPTokenizer, "tokenizer_2": transformers.T5TokenizerFast}


class PipelineSlot(HeldSlot):
    """A FluxPipeline folder held by this rank under one layout."""

    def __init__(self, model: ModelSpec, parallel: ParallelSpec, backend: Backend):
        super().__init__(model, parallel, backend)
        self.folder = Path(model.path)
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        self.is_first = backend.rank == 0
        self.slices: list[SliceRead] = []  # what was read of the transformer, for tests of the sharded load

    # ---- load

    def _load(self, report: Report, cancelled: IsCancelled) -> None:
        mesh = build_mesh(self.parallel, self.backend.device.type)
        planned = plan_transformer(open_folder(self.folder / "transformer"), self.parallel, mesh)
        set_attention(planned.model, self.parallel.attention)
        total = planned.bytes_to_read
        if self.is_first:
            total += sum(_folder_bytes(self.folder / name) for name in (*_ENCODERS, "vae"))
        counter = ByteCounter(report, total)
        model = load_transformer(
            planned,
            self.backend,
            self.dtype,
            on_bytes=counter.add,
            cancelled=cancelled,
            on_slice=self.slices.append,
        )
        if self.parallel.context > 1:
            divide_sequence(model, mesh, self.backend.pulse.entered)
        self.backend.pulse.watch(model)
        self.copies = Copies(self.parallel, mesh)
        self.transformer = model
        self._assemble(counter, cancelled)

    def _forget(self) -> None:
        for part in ("transformer", "denoising", "encoding", "vae"):
            self.__dict__.pop(part, None)

    def _assemble(self, counter: ByteCounter, cancelled: IsCancelled) -> None:
        """Two upstream pipelines over one set of components: one that denoises, one (on rank 0) that encodes."""
        self.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(self.folder / "scheduler")
        self.denoising = diffusers.FluxPipeline(
            **{**_NO_COMPONENTS, "transformer": self.transformer, "scheduler": self.scheduler}
        )
        self.denoising.set_progress_bar_config(disable=True)
        config = diffusers.AutoencoderKL.load_config(self.folder / "vae")
        self.vae_factor = 2 ** (len(config["block_out_channels"]) - 1)
        self.scaling, self.shift = config["scaling_factor"], config.get("shift_factor") or 0.0
        self.denoising.vae_scale_factor = self.vae_factor
        if not self.is_first:
            return
        parts: dict[str, Any] = {}
        for name, component in _ENCODERS.items():
            parts[name] = self._whole(component, name, counter, cancelled)
        for name, tokenizer in _TOKENIZERS.items():
            parts[name] = tokenizer.from_pretrained(self.folder / name, local_files_only=True)
        self.encoding = diffusers.FluxPipeline(**{**_NO_COMPONENTS, **parts})
        self.vae = self._whole(diffusers.AutoencoderKL, "vae", counter, cancelled)

    def _whole(self, component: Any, name: str, counter: ByteCounter, cancelled: IsCancelled) -> Any:
        """A component that rank 0 alone holds, in host RAM until its stage comes."""
        pulse = self.backend.pulse
        pulse.unmeasured()
        with pulse.stoppable(cancelled), _between_tensors(pulse.advance):
            module = component.from_pretrained(
                self.folder / name, local_files_only=True, use_safetensors=True, dtype=self.dtype
            )
        pulse.warmed_up()  # what was slow about it is over
        pulse.watch(module, closely=True)  # it runs alone, and may be stopped anywhere
        counter.add(_folder_bytes(self.folder / name))
        return module.eval().requires_grad_(False)

    def info(self) -> SlotInfo:
        config = self.transformer.config
        return SlotInfo(
            weight_bytes=parameter_bytes(self.transformer),
            seconds=self.seconds,
            latent_channels=config.in_channels // _PATCH**2,
            vae_factor=self.vae_factor,
            size_multiple=self.vae_factor * _PATCH,
            text_width=config.joint_attention_dim,
            pooled_width=config.pooled_projection_dim,
            takes_guidance=config.guidance_embeds,
        )

    # ---- encode

    def encode(self, prompt: str, cancelled: IsCancelled, on_host: bool = False) -> dict[str, torch.Tensor]:
        """`prompt_embeds` [1, T, D] and `pooled` [1, P] on rank 0, nothing elsewhere. No collective."""
        if not self.is_first:
            return {}
        if cancelled():
            raise Cancelled("Cancelled before encoding.")
        pipe = self.encoding
        length = min(512, pipe.tokenizer_2.model_max_length)
        both = torch.nn.ModuleList([pipe.text_encoder, pipe.text_encoder_2])
        with (
            self.backend.pulse.stoppable(cancelled),
            self.backend.staged(both, parameter_bytes(both), on_host) as device,
        ):
            embeds, pooled, _ = pipe.encode_prompt(prompt, device=device, max_sequence_length=length)
            return {"prompt_embeds": embeds.cpu(), "pooled": pooled.cpu()}

    # ---- sample

    def sample(
        self, request: Sample, tensors: Mapping[str, torch.Tensor], report: Report, cancelled: IsCancelled
    ) -> dict[str, torch.Tensor]:
        """Denoise on all ranks together; `samples` [B, C, h, w] in VAE space on rank 0. Raises Cancelled on all."""
        self._stop_together(cancelled)
        sigmas = schedule(request.steps, request.denoise)
        x, rows, columns = self._start(request, tensors.get("latent"), sigmas)
        text = {
            name: tensors[key]
            .expand(request.batch_size, *tensors[key].shape[1:])
            .to(self.backend.device, self.dtype)
            for name, key in (("prompt_embeds", "prompt_embeds"), ("pooled_prompt_embeds", "pooled"))
        }

        before = x

        def step_ended(pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            nonlocal before
            after = values["latents"]
            if self.is_first:
                images = {}
                if request.preview:
                    clean = predicted_clean(before, after, pipe.scheduler.sigmas, step)
                    images["preview"] = unpack(clean, rows, columns).float().cpu()
                report(Progress(phase="sampling", done=step + 1, total=request.steps), images)
            before = after
            self.backend.pulse.warmed_up()
            self._stop_together(cancelled)
            return values

        result = self.denoising(
            **text,
            latents=x,
            sigmas=sigmas,
            num_inference_steps=len(sigmas),
            guidance_scale=request.guidance,
            height=rows * self.vae_factor,
            width=columns * self.vae_factor,
            output_type="latent",
            callback_on_step_end=step_ended,
        )
        if not self.is_first:
            return {}
        latent = unpack(result.images, rows, columns).float().cpu()
        return {"samples": latent / self.scaling + self.shift}

    def _stop_together(self, cancelled: IsCancelled) -> None:
        """A step boundary: if any rank has heard a cancel, all stop here."""
        if self.backend.any_rank(cancelled()):
            raise Cancelled("Cancelled.")

    def _start(
        self, request: Sample, latent: torch.Tensor | None, sigmas: list[float]
    ) -> tuple[torch.Tensor, int, int]:
        """Packed starting latents [B, tokens, 4C], and the latent's rows and columns.

        The noise is drawn as ComfyUI draws it: fp32, one CPU generator, the whole batch at once. With an input latent
        it is mixed in as the flow demands, x = sigma * noise + (1 - sigma) * latent.
        """
        channels = self.transformer.config.in_channels // _PATCH**2
        rows, columns = request.height // self.vae_factor, request.width // self.vae_factor
        generator = torch.Generator("cpu").manual_seed(request.seed)
        x = torch.randn((request.batch_size, channels, rows, columns), generator=generator)
        if latent is not None:
            first = self._first_sigma(sigmas, rows * columns // _PATCH**2)
            x = first * x + (1 - first) * (latent.float() - self.shift) * self.scaling
        return pack(x).to(self.backend.device, self.dtype), rows, columns

    def _first_sigma(self, sigmas: list[float], tokens: int) -> float:
        """The noise level the scheduler will start from, its shift for this size applied."""
        scheduler = copy.deepcopy(self.scheduler)
        config = scheduler.config
        mu = calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        return float(scheduler.sigmas[0])

    # ---- decode

    def decode(
        self,
        request: Decode,
        samples: torch.Tensor,
        allocate: Allocate,
        report: Report,
        cancelled: IsCancelled,
    ) -> dict[str, torch.Tensor]:
        """`images` [B, H, W, 3] float32 in 0..1 on rank 0, nothing elsewhere. One picture at a time; no collective."""
        if not self.is_first:
            return {}
        count = samples.shape[0]
        images: torch.Tensor | None = None
        with (
            self.backend.pulse.stoppable(cancelled),
            self.backend.staged(self.vae, parameter_bytes(self.vae), request.on_host) as device,
            self._tiling(request.tiled),
        ):
            for number, latent in enumerate(samples):
                if cancelled():
                    raise Cancelled("Cancelled while decoding.")
                picture = self.vae.decode(latent[None].to(device, self.dtype), return_dict=False)[0]
                picture = (picture / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
                if images is None:
                    images = allocate((count, *picture.shape[1:]), torch.float32)
                images[number].copy_(picture[0])
                report(Progress(phase="decoding", done=number + 1, total=count))
        assert images is not None
        return {"images": images}

    @contextmanager
    def _tiling(self, wanted: bool) -> Iterator[None]:
        """While it is open, the VAE decodes what is larger than a tile in tiles, if that is `wanted`."""
        if not wanted:
            yield
            return
        # Its own are as large as the pictures that it was trained with.
        self.vae.tile_sample_min_size, self.vae.tile_latent_min_size = _TILE, _TILE // self.vae_factor
        self.vae.enable_tiling()
        try:
            yield
        finally:
            self.vae.disable_tiling()


@contextmanager
def _between_tensors(call: Callable[[], None]) -> Iterator[None]:
    """While it is open, transformers calls `call` between two tensors of a model that it loads; it may raise.

    Through the progress bar that it shows: a version without that hook loads the model in one go.
    """
    set_hook = getattr(transformers.utils.logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def hook(_make: Any, args: tuple[Any, ...], _options: dict[str, Any]) -> Iterator[Any]:
        for item in args[0]:
            call()
            yield item

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


def schedule(steps: int, denoise: float) -> list[float]:
    """Unshifted noise levels of a run of `steps` steps.

    With `denoise` below 1 they are the last `steps` of a schedule that is longer by 1 / denoise, as in ComfyUI's
    KSampler, so that `steps` always counts the steps that are made.
    """
    total = steps if denoise >= 1 else max(steps, int(steps / denoise))
    return [float(sigma) for sigma in numpy.linspace(1.0, 1 / total, total)[-steps:]]


def predicted_clean(
    before: torch.Tensor, after: torch.Tensor, sigmas: torch.Tensor, step: int
) -> torch.Tensor:
    """The clean latent an Euler step points to: x0 = x' - s' * (x' - x) / (s' - s)."""
    this, following = float(sigmas[step]), float(sigmas[step + 1])
    return after - following * (after - before) / (following - this)


def pack(latent: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] -> [B, h/2 * w/2, 4C], as FluxPipeline._pack_latents."""
    batch, channels, rows, columns = latent.shape
    cells = latent.view(batch, channels, rows // _PATCH, _PATCH, columns // _PATCH, _PATCH)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns // _PATCH**2, channels * _PATCH**2)


def unpack(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `pack`."""
    batch, _, width = tokens.shape
    cells = tokens.view(batch, rows // _PATCH, columns // _PATCH, width // _PATCH**2, _PATCH, _PATCH)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(batch, width // _PATCH**2, rows, columns)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
