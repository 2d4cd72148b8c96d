"""Attention backends by name: what is refused, that a choice reaches all of one model and nothing else, and masks.

This machine has no card and none of the packages: their functions are mocks that compute with PyTorch on the CPU, in
the shapes and with the arguments of the real ones. What the real kernels compute is not tested here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import diffusers.models.transformers
import pytest
import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName

from runtime import attention_backends, environment, planner
from runtime.attention_backends import BACKENDS, CHOOSING_CLASSES, MASKING_CLASSES, AttentionBackend
from runtime.devices import cpu_devices
from runtime.engine import denoiser, dispatch, mesh, pipelines
from runtime.engine.attention import native_kernel
from runtime.engine.backend import Backend
from runtime.engine.context import divide_sequence
from runtime.engine.denoiser import DenoiserSlot
from runtime.engine.kernels import kernel_of, set_attention
from runtime.engine.pipelines import PipelineSlot
from runtime.environment import RankEnvironment
from runtime.group import GROUPS
from runtime.spec import ATTENTION_BACKENDS, AXES, Layout, ModelSpec, ParallelConfig, ParallelSpec
from tests.parity.matrix import CASES, drawn, outputs
from tests.support.mocks import mock_cards, mock_facts
from tests.support.reference import max_rel
from tests.support.refusals import refused

FLUX, QWEN, SD3 = "FluxTransformer2DModel", "QwenImageTransformer2DModel", "SD3Transformer2DModel"
PACKAGED = [name for name, backend in BACKENDS.items() if backend.package]
OTHERS = [name for name in BACKENDS if name != "native"]
MASKLESS = [name for name, backend in BACKENDS.items() if not backend.masks]
REGISTRY = attention_dispatch._AttentionBackendRegistry


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Mock of the packages that are installed: backend -> version."""

    def with_versions(**versions: str) -> None:
        def version(backend: AttentionBackend) -> str | None:
            return versions.get(backend.name)

        monkeypatch.setattr(attention_backends, "installed_version", version)

    return with_versions


@pytest.fixture
def everything(install: Callable[..., None]) -> None:
    install(flash="2.8.3", sage="2.2.0")


def chosen(attention: str, facts: Any = None, dtype: str = "auto", cards: Any = None) -> str:
    config = ParallelConfig(attention=attention)
    layout = planner.plan(
        facts or mock_facts(), config, mock_cards(24, 24) if cards is None else cards, dtype
    )
    return layout.spec.attention


# ---- the table


def test_the_parallel_config_offers_what_the_table_holds() -> None:
    assert list(ATTENTION_BACKENDS) == ["auto", *BACKENDS]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_takes_part_in_context_parallelism_and_none_is_downloaded(name: str) -> None:
    upstream = AttentionBackendName(BACKENDS[name].upstream)
    assert upstream not in attention_dispatch._HUB_KERNELS_REGISTRY
    assert REGISTRY._is_context_parallel_available(upstream)
    assert not BACKENDS[name].masks or "attn_mask" in REGISTRY._supported_arg_names[upstream]


@pytest.mark.parametrize(("name", "constant"), [("flash", "FLASH"), ("sage", "SAGE")])
def test_the_oldest_versions_are_those_of_diffusers(name: str, constant: str) -> None:
    assert BACKENDS[name].at_least == getattr(attention_dispatch, f"_REQUIRED_{constant}_VERSION")


def test_flash_attention_3_of_diffusers_takes_no_notice_of_a_divided_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why it is not offered. When this fails it may be."""
    query = torch.zeros(1, 3, 2, 8)
    monkeypatch.setattr(attention_dispatch, "_wrapped_flash_attn_3", lambda q, **_: (q, None))
    local = attention_dispatch._flash_attention_3(query, query, query, _parallel_config=object())
    assert local is query


# ---- refused before loading


@pytest.mark.parametrize("wanted", ["", "flash_hub", "_native_math", "hub/kernel", "Native"])
def test_unknown_names_are_refused(install: Callable[..., None], wanted: str) -> None:
    install()
    with refused(f"'{wanted}'", "auto, native, cudnn."):
        planner.check_config(ParallelConfig(attention=wanted))


@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.parametrize("found", [None, "1.0.6", "2.0.9.post1", "unreadable"])
def test_a_package_that_is_missing_or_too_old_is_refused(
    install: Callable[..., None], name: str, found: str | None
) -> None:
    backend = BACKENDS[name]
    install(**({name: found} if found else {}))
    says = f"is {found}" if found else "is not installed"
    with refused(f"'{name}'", f"{backend.package} {says}", backend.at_least, "auto, native, cudnn."):
        planner.check_config(ParallelConfig(attention=name))


@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.parametrize("found", ["2.6.3", "2.7.4.post1", "2.10.0+cu130", "3.0.0b1"])
def test_a_package_that_is_new_enough_is_taken(install: Callable[..., None], name: str, found: str) -> None:
    install(**{name: found})
    planner.check_config(ParallelConfig(attention=name))
    assert chosen(name) == name


def test_packages_are_looked_for_without_importing_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sageattention").mkdir()
    (tmp_path / "sageattention" / "__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = attention_backends.installed_version(BACKENDS["sage"])
    assert found is None  # the module alone, without what pip writes beside it, as diffusers sees it
    (tmp_path / "sageattention-2.2.0.dist-info").mkdir()
    (tmp_path / "sageattention-2.2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sageattention\nVersion: 2.2.0\n"
    )
    assert attention_backends.installed_version(BACKENDS["sage"]) == "2.2.0"


@pytest.mark.parametrize("wanted", ["auto", "native"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("model", [FLUX, SD3, "UnknownTransformer"])
@pytest.mark.parametrize("cards", [(), mock_cards(24, 24)])
def test_native_is_taken_everywhere(wanted: str, dtype: str, model: str, cards: Any) -> None:
    assert chosen(wanted, mock_facts(1, transformer_class=model), dtype, cards) == "native"


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("name", OTHERS)
class TestOthers:
    @pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
    @pytest.mark.parametrize("axis", [axis for axis in AXES if axis in ("tensor", "ulysses")])
    def test_a_model_that_suits_is_accepted_in_every_layout(self, name: str, dtype: str, axis: str) -> None:
        degrees = ParallelSpec(**{axis: 2})  # type: ignore[arg-type]
        config = ParallelConfig(strategy="manual", degrees=degrees, attention=name)
        layout = planner.plan(mock_facts(1), config, mock_cards(24, 24), dtype)
        assert (layout.spec.attention, layout.spec.degrees()[axis]) == (name, 2)

    def test_not_on_the_cpu(self, name: str) -> None:
        with refused(f"'{name}'", "on the CPU", "instead: native."):
            chosen(name, cards=())

    def test_not_in_float32(self, name: str) -> None:
        with refused(f"'{name}'", "float32", f"instead: native, or dtype bfloat16 with {name}."):
            chosen(name, mock_facts(1, stored="float32"))
        assert chosen(name, mock_facts(1, stored="float32"), "bfloat16") == name

    @pytest.mark.parametrize("model", [SD3, "CosmosTransformer3DModel", "UnknownTransformer"])
    def test_not_with_a_model_that_it_would_not_reach(self, name: str, model: str) -> None:
        with refused(f"'{name}'", model, "instead: native."):
            chosen(name, mock_facts(1, transformer_class=model))

    @pytest.mark.parametrize("model", sorted(MASKING_CLASSES))
    def test_not_without_masks_with_a_model_that_always_has_one(self, name: str, model: str) -> None:
        facts = mock_facts(1, transformer_class=model)
        if BACKENDS[name].masks:
            assert chosen(name, facts) == name
            return
        with refused(f"'{name}'", model, "mask", "instead: native, or cudnn."):
            chosen(name, facts)


def test_another_attention_is_another_slot() -> None:
    model, devices = ModelSpec(path="/models/a", pipeline_class="", dtype="bfloat16"), mock_cards(24, 24)
    layouts = [
        Layout(spec=ParallelSpec(tensor=2, attention=name), devices=devices, reason="") for name in BACKENDS
    ]
    slots = [GROUPS.slot(layout, model) for layout in layouts]
    assert len({slot.name for slot in slots}) == len(BACKENDS)


@pytest.mark.parametrize("name", ["DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_TRUST_REMOTE_KERNELS"])
def test_the_environment_does_not_choose_for_the_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "flash_hub")
    assert name not in environment.group_environment(cpu_devices(2))


# ---- mocks of the kernels


def mock_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, scale: float | None) -> Any:
    """Out and log-sum-exp [B, H, S, D] and [B, H, S] by the formula; for grouped queries too."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def mock_flash_forward(q, k, v, dropout_p, scale, causal, left, right, softcap, alibi, return_softmax):
    assert (dropout_p, causal, left, right, softcap, alibi, return_softmax) == (
        0,
        False,
        -1,
        -1,
        0,
        None,
        False,
    )
    out, lse = mock_attention(*(one.transpose(1, 2) for one in (q, k, v)), None, scale)
    return out.transpose(1, 2), lse, None, None


def mock_flash(q, k, v, dropout_p, softmax_scale, causal, window_size, return_attn_probs):
    assert not return_attn_probs
    return mock_flash_forward(q, k, v, dropout_p, softmax_scale, causal, *window_size, 0, None, False)[0]


def mock_sage(q, k, v, tensor_layout, is_causal, sm_scale, return_lse):
    assert tensor_layout == "NHD" and not is_causal
    out, lse = mock_attention(*(one.transpose(1, 2) for one in (q, k, v)), None, sm_scale)
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)


def mock_cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale
):
    assert all(one.is_contiguous() for one in (query, key, value))
    assert attn_bias is None or attn_bias.dtype == query.dtype
    out, lse = mock_attention(query, key, value, attn_bias, scale)
    return (out, lse[..., None], *[None] * 7)


@pytest.fixture
def mock_kernels(monkeypatch: pytest.MonkeyPatch, everything: None) -> Iterator[None]:
    """As if flash-attn and sageattention were installed, and cuDNN ran on the CPU; upstream is as it was afterwards."""
    for name, value in (
        ("_CAN_USE_FLASH_ATTN", True),
        ("_CAN_USE_SAGE_ATTN", True),
        ("flash_attn_func", mock_flash),
        ("_wrapped_flash_attn_forward", mock_flash_forward),
        ("sageattn", mock_sage),
        ("_templated_context_parallel_attention", attention_dispatch._templated_context_parallel_attention),
    ):
        monkeypatch.setattr(attention_dispatch, name, value)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", mock_cudnn)
    before = REGISTRY.get_active_backend()[0]
    yield
    REGISTRY.set_active_backend(before)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    """The mesh of a rank alone: attention goes the way it goes over several."""
    mesh._mesh.cache_clear()  # of another test's process group
    dist.init_process_group(
        "cpu:gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield mesh.build_mesh(ParallelSpec(), "cpu")
    dist.destroy_process_group()
    mesh._mesh.cache_clear()


@torch.no_grad()
def run(name: str, model: Any, **changes: Any) -> torch.Tensor:
    return outputs(CASES[name].run(model, {**drawn(CASES[name], 0)[1], **changes}))[0]


def no_mask(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None for name in inputs if "mask" in name}


# ---- one model's choice


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", OTHERS)
def test_a_choice_is_one_models_own(name: str) -> None:
    upstream = AttentionBackendName(BACKENDS[name].upstream)
    mine, other, later = (drawn(CASES[FLUX], 0)[0] for _ in range(3))
    default = REGISTRY.get_active_backend()[0]
    set_attention(mine, name)
    assert backends_of(mine) == {upstream}
    assert backends_of(other) == {None}  # the default of the process, which is as it was
    assert REGISTRY.get_active_backend()[0] is default is AttentionBackendName.NATIVE
    set_attention(later, "native")
    assert backends_of(later) == {None}
    assert backends_of(mine) == {upstream}


@pytest.mark.usefixtures("mock_kernels")
def test_upstreams_setter_alone_would_choose_for_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault of diffusers 0.42. When this fails, `attention_backend` in kernels.py has become needless."""
    calls = []
    monkeypatch.setattr(
        attention_dispatch, "flash_attn_func", lambda **kw: calls.append(1) or mock_flash(**kw)
    )
    mine, other = (drawn(CASES[FLUX], 0)[0] for _ in range(2))
    set_attention(mine, "flash")
    run(FLUX, other)
    assert not calls
    mine.set_attention_backend("flash")
    run(FLUX, other)
    assert calls


def backends_of(model: Any) -> set[Any]:
    modules = (module for module in model.modules() if hasattr(module, "processor"))
    return {module.processor._attention_backend for module in modules}


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", PACKAGED)
def test_a_package_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(attention_dispatch, f"_CAN_USE_{name.upper()}_ATTN", False)
    model = drawn(CASES[FLUX], 0)[0]
    with refused(f"'{name}'", f"{BACKENDS[name].package} is installed but does not load", "native"):
        set_attention(model, name)
    assert backends_of(model) == {None}


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", OTHERS)
def test_a_card_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with refused(f"'{name}'", "8.0", "7.5", "native"):
        set_attention(drawn(CASES[FLUX], 0)[0], name)


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_takes_no_choice_is_refused_by_the_ranks_too(name: str) -> None:
    with refused(f"'{name}'", SD3, "native"):
        set_attention(drawn(CASES[SD3], 0)[0], name)


@pytest.mark.parametrize("name", ["flash_hub", "_native_math", ""])
def test_ranks_know_no_other_names(name: str) -> None:
    with refused(f"'{name}'"):
        set_attention(drawn(CASES[FLUX], 0)[0], name)


@pytest.mark.usefixtures("mock_kernels", "one_rank")
@pytest.mark.parametrize("slot_class", [DenoiserSlot, PipelineSlot])
@pytest.mark.parametrize("name", [*OTHERS, "flash_hub"])
def test_slots_set_the_attention_of_their_layout_before_they_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slot_class: Any, name: str
) -> None:
    def reads(planned: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"reads with {backends_of(planned.model)}")

    for module in (denoiser, pipelines):
        monkeypatch.setattr(module, "load_transformer", reads)
    drawn(CASES[FLUX], 0)[0].save_pretrained(tmp_path / "transformer")
    path = tmp_path if slot_class is PipelineSlot else tmp_path / "transformer"
    slot = slot_class(
        ModelSpec(path=str(path), pipeline_class="", dtype="float32"),
        ParallelSpec(attention=name),
        Backend(torch.device("cpu"), RankEnvironment(rank=0, local_rank=0, world_size=1)),
    )
    if name in BACKENDS:
        expected = {AttentionBackendName(BACKENDS[name].upstream)}
        with pytest.raises(RuntimeError, match=re.escape(f"reads with {expected}")):
            slot.load(lambda *_: None, lambda: False)
    else:
        with refused(f"'{name}'"):
            slot.load(lambda *_: None, lambda: False)


# ---- what a chosen backend computes, and masks


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.parametrize("model_class", [FLUX, QWEN])
def test_without_masks_it_computes_the_same(name: str, model_class: str) -> None:
    model, inputs = drawn(CASES[model_class], 0)
    expected = run(model_class, model, **no_mask(inputs))
    set_attention(model, name)
    assert max_rel(run(model_class, model, **no_mask(inputs)), expected) < 5e-6


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("masked", [False, True])
def test_over_the_context_axes_it_computes_the_same_or_refuses_the_mask(
    monkeypatch: pytest.MonkeyPatch, one_rank: Any, name: str, masked: bool
) -> None:
    """Qwen-Image's masks are taken away at the block and given to the attention by our side."""
    model, inputs = drawn(CASES[QWEN], 0)
    changes = {} if masked else no_mask(inputs)
    expected = run(QWEN, model, **changes)
    assert max_rel(run(QWEN, model, **no_mask(inputs)), expected) > 5e-4 or not masked
    set_attention(model, name)
    divide_sequence(model, one_rank)
    if masked and not BACKENDS[name].masks:
        monkeypatch.setattr(dispatch, "context_attention", None)  # before ranks exchange anything
        with refused(f"'{name}'", "mask", "native, or cudnn"):
            run(QWEN, model, **changes)
    else:
        assert max_rel(run(QWEN, model, **changes), expected) < 5e-6


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", MASKLESS)
def test_a_mask_that_it_cannot_take_is_refused_on_one_rank_too(name: str) -> None:
    model, _ = drawn(CASES[QWEN], 0)
    set_attention(model, name)
    with refused(f"'{name}'", "mask", "native, or cudnn"):
        run(QWEN, model)


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize("name", MASKLESS)
def test_other_errors_stay_what_they_are(name: str) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("of another kind")

    model = drawn(CASES[FLUX], 0)[0]
    model.forward = fails  # type: ignore[method-assign]
    set_attention(model, name)
    with pytest.raises(ValueError, match="of another kind"):
        run(FLUX, model)


FORWARD_OPS = {
    "flash": attention_dispatch._flash_attention_forward_op,
    "cudnn": attention_dispatch._cudnn_attention_forward_op,
    "sage": attention_dispatch._sage_attention_forward_op,
}


@pytest.mark.usefixtures("mock_kernels")
@pytest.mark.parametrize(
    ("name", "mask"),
    [*((name, None) for name in OTHERS), ("cudnn", "boolean"), ("cudnn", "additive")],
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_kernel_gives_what_a_ring_merges(name: str, mask: str | None, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, tokens, 3, 8, generator=generator) for tokens in (5, 7, 7))
    given = bias = None
    if mask:
        keep = torch.arange(7) < torch.tensor([4, 7])[:, None, None, None]
        bias = torch.zeros(keep.shape).masked_fill(~keep, -1e30)
        given = keep if mask == "boolean" else bias
    kernel, native = kernel_of(FORWARD_OPS[name]), native_kernel(q, k, v, bias, scale, True)
    for ours, expected in zip(kernel(q, k, v, given, scale, True), native, strict=True):
        assert ours.shape == expected.shape
        assert max_rel(ours, expected) < 5e-6
    assert max_rel(kernel(q, k, v, given, scale, False), native[0]) < 5e-6


def test_native_keeps_our_own_kernel_and_unknown_operators_are_an_error() -> None:
    assert kernel_of(attention_dispatch._native_attention_forward_op) is native_kernel
    with pytest.raises(RuntimeError, match="_npu_attention_forward_op"):
        kernel_of(attention_dispatch._npu_attention_forward_op)


# ---- which classes take a choice


class Recorder:
    """Mock of a backend that notes how it is called and computes with PyTorch."""

    def __init__(self) -> None:
        self.calls, self.masks, self.unsuited = 0, 0, 0

    def __call__(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ) -> torch.Tensor:
        self.calls += 1
        self.masks += attn_mask is not None
        self.unsuited += is_causal or (attn_mask is not None and attn_mask.ndim != 4)
        return attention_dispatch._native_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )


ARGUMENTS = set(inspect.signature(Recorder.__call__).parameters) - {"self"}


class Recorded(NamedTuple):
    """One forward of a class: whether all its attention went to the chosen backend and suits it, and saw a mask."""

    suits: bool
    masked: bool


@cache
def recorded(name: str, with_masks: bool) -> Recorded:
    model, inputs = drawn(CASES[name], 0)
    takes = False
    for path, module in model.named_modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_attention_backend"):
            if processor._attention_backend is not None:  # AnyFlow FAR: takes this one only
                return Recorded(False, False)
            processor._attention_backend = AttentionBackendName.FLASH
            takes = True
        elif processor is not None and not ("refiner" in path or "Linear" in type(processor).__name__):
            return Recorded(False, False)
    if not takes:
        return Recorded(False, False)
    chosen, default = Recorder(), Recorder()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for backend, mock in ((AttentionBackendName.FLASH, chosen), (AttentionBackendName.NATIVE, default)):
            patch.setitem(REGISTRY._backends, backend, mock)
            patch.setitem(REGISTRY._supported_arg_names, backend, ARGUMENTS)
        CASES[name].run(model, inputs if with_masks else without_masks(name, inputs))
    return Recorded(bool(chosen.calls) and not chosen.unsuited and not default.calls, bool(chosen.masks))


def without_masks(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs less every mask that the class can do without; of samples that it pads itself, one."""
    signature = inspect.signature(getattr(diffusers.models.transformers, name).forward).parameters
    # Its default is None, which its forward then cannot read.
    needed = {"HunyuanVideo15Transformer3DModel": "encoder_attention_mask_2"}.get(name)
    kept = {}
    for key, value in inputs.items():
        if "mask" in key and key != needed and signature[key].default is None:
            continue
        if isinstance(value, dict):
            value = {inner: one for inner, one in value.items() if "mask" not in inner}
        if name == "ZImageTransformer2DModel" and isinstance(value, list | torch.Tensor):
            value = value[:1]
        kept[key] = value
    return kept


def test_the_listed_classes_are_those_whose_attention_all_takes_the_choice() -> None:
    assert {name for name in CASES if recorded(name, True).suits} == CHOOSING_CLASSES


def test_the_masking_classes_are_those_that_cannot_do_without_a_mask() -> None:
    masked = [name for name in CHOOSING_CLASSES if recorded(name, True).masked]
    assert {name for name in masked if recorded(name, False).masked} == MASKING_CLASSES
