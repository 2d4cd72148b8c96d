"""A sharded MODEL under ComfyUI's real memory manager, on two cards of 24 GiB that this machine does not have.

Real: load_models_gpu, free_memory, unload_all_models, model patchers, the pack, its group and its ranks. Mocks, all in
`MockCards`: which devices there are, how much of them is free, how large a shard is, and what needs a driver.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import pytest
import torch

from tests.parity_native.host import Host
from tests.support.models import randomise
from tests.support.processes import wait_until
from tests.support.threads import one_torch_thread

GIB = 1 << 30
CARD, SHARD = 24 * GIB, 15 * GIB
WIDTH = 32  # of the text
EXPERTS = ("high", "low")


class MockCards:
    """Mock cards. `cpu:0` and `cpu:1` are two devices to ComfyUI, and tensors "on" them compute.

    What is free is what is left beside the weights that native models and slots hold in truth, listed or not.
    """

    devices = (torch.device("cpu", 0), torch.device("cpu", 1))

    def __init__(self, groups: Any) -> None:
        self._groups = groups
        self.natives: list[Any] = []
        self.working = 0  # bytes on the first card in use for computing
        self.emptied = 0

    def slots(self) -> dict[str, str]:
        """The state of every slot by its name."""
        return {slot["name"]: slot["state"] for group in self._groups.snapshot() for slot in group["slots"]}

    def free(self, device: torch.device) -> int:
        held = [one.model.model_loaded_weight_memory for one in self.natives if one.load_device == device]
        shards = [SHARD for state in self.slots().values() if state == "loaded"]
        return CARD - sum(held) - sum(shards) - (self.working if device == self.devices[0] else 0)

    def get_free_memory(self, dev: Any = None, torch_free_too: bool = False) -> Any:
        dev = self.devices[0] if dev is None else dev
        free = self.free(dev) if dev in self.devices else 64 * GIB
        return (free, 0) if torch_free_too else free

    def soft_empty_cache(self, *_: Any) -> None:
        self.emptied += 1

    def install(self, patch: pytest.MonkeyPatch, host: Host) -> None:
        management = importlib.import_module("comfy.model_management")
        patch.setattr(management, "get_torch_device", lambda: self.devices[0])
        patch.setattr(management, "get_all_torch_devices", lambda *_: list(self.devices), raising=False)
        patch.setattr(management, "get_free_memory", self.get_free_memory)
        patch.setattr(management, "soft_empty_cache", self.soft_empty_cache)
        comfy_host = host.pack("nodes.comfy_host")
        patch.setattr(comfy_host, "torch_device_of", lambda device: self.devices[device.index])
        patch.setattr(host.pack("runtime.planner"), "shard_bytes", lambda *_: (SHARD, SHARD))
        self._watch_loads(patch, host)

    def _watch_loads(self, patch: pytest.MonkeyPatch, host: Host) -> None:
        """No mock: whenever the ranks are told to load, both cards must have the room."""
        load = host.pack("runtime.spec").Load
        group = host.pack("runtime.group").WorkerGroup
        call = group.call

        def watched(this: Any, request: Any, *more: Any, **others: Any) -> Any:
            if isinstance(request, load):
                assert min(map(self.free, self.devices)) >= SHARD, "loading where there is no room"
            return call(this, request, *more, **others)

        patch.setattr(group, "call", watched)


class Desk:
    """What a test works with: ComfyUI, the cards, and MODELs of two experts."""

    def __init__(self, host: Host, cards: MockCards, files: dict[str, Path]):
        self.host, self.cards, self.files = host, cards, files
        self.management = importlib.import_module("comfy.model_management")
        self.nodes = importlib.import_module("nodes")
        self.groups = host.pack("runtime.group").GROUPS
        numbers = torch.Generator().manual_seed(1)
        self._texts = [
            [
                [
                    torch.randn(1, 16, WIDTH, generator=numbers),
                    {"pooled_output": torch.randn(1, WIDTH), "guidance": 3.5},
                ]
            ]
            for _ in range(2)
        ]

    def model(self, name: str = "high", axis: str = "tensor", strategy: str = "manual") -> Any:
        """A MODEL as the loader node gives it, two ranks on an axis, one on each card."""
        spec = self.host.pack("runtime.spec")
        config = spec.ParallelConfig(strategy=strategy, degrees=spec.ParallelSpec(**{axis: 2}), devices="cpu")
        model = self.host.pack("nodes.native.model").sharded_model(self.files[name], config, "float32")[0]
        # As large to the planner as to the cards: what a tiny model computes with is more than its weights.
        remote, replace = model.model.sharded, msgspec.structs.replace
        facts = replace(remote.wanted.facts, transformer_bytes=2 * SHARD, split_bytes=2 * SHARD)
        remote.wanted = replace(remote.wanted, facts=facts)
        return model

    def sample(self, model: Any, side: int = 8, steps: int = 2, cfg: float = 4.0) -> torch.Tensor:
        """The latents of a KSampler, of `side` x `side`."""
        empty = {"samples": torch.zeros(1, 16, side, side)}
        with torch.inference_mode():
            run = self.nodes.KSampler().sample
            return run(model, 3, steps, cfg, "euler", "simple", *self._texts, empty)[0]["samples"].clone()

    def native(self, gib: int, card: int = 0) -> Any:
        """A model of ComfyUI's own kind: blocks of half a GiB, each one number seen many times."""
        ops = importlib.import_module("comfy.ops").manual_cast
        patcher = importlib.import_module("comfy.model_patcher").ModelPatcher

        class Block(ops.Linear):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__(1, 1, bias=False)
                self.weight = torch.nn.Parameter(torch.zeros(1).expand(8192, 16384), requires_grad=False)

            def _apply(self, *_: Any, **__: Any) -> Any:
                return self  # or moving it would make it real

        blocks = [Block() for _ in range(2 * gib)]
        one = patcher(torch.nn.Sequential(*blocks), self.cards.devices[card], torch.device("cpu"))
        self.cards.natives.append(one)
        return one

    def load(self, *models: Any, computing: float = 0) -> None:
        """What every stock node does before it computes with models, and `computing` GiB while it does."""
        self.management.load_models_gpu(list(models), memory_required=computing * GIB)

    def held(self, native: Any) -> float:
        """GiB of a native model that are on its card."""
        return native.model.model_loaded_weight_memory / GIB

    def state(self, model: Any) -> str:
        """Of a MODEL's slot: "loaded", "parked" or "" for neither."""
        return self.cards.slots().get(model.model.sharded.slot.name, "")

    def load_of(self, model: Any) -> object:
        """Another object after each load."""
        return self.groups.groups()[0].slots.get(model.model.sharded.slot.name)

    def layout(self, model: Any) -> str:
        return model.model.sharded.slot.layout.spec.describe()

    def pids(self) -> list[int]:
        return [rank["pid"] for rank in self.groups.snapshot()[0]["ranks"]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One ComfyUI in this process and one group for the whole file."""
    place = tmp_path_factory.mktemp("memory")
    files = {name: _transformer(place / name / "transformer", seed) for seed, name in enumerate(EXPERTS)}
    level = logging.getLogger().level
    with pytest.MonkeyPatch.context() as patch, one_torch_thread():
        patch.setattr(sys, "path", [*sys.path])  # ComfyUI puts itself in front
        host = Host(place / "comfyui")
        groups = host.pack("runtime.group").GROUPS
        cards = MockCards(groups)
        cards.install(patch, host)
        yield Desk(host, cards, files)
        groups.close_all()
    logging.getLogger().setLevel(level)


def _transformer(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = diffusers.FluxTransformer2DModel(
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    randomise(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def desk(bench: Desk, caplog: pytest.LogCaptureFixture) -> Iterator[Desk]:
    """An empty machine before and after; nothing may have been called a leak, or have taken more than there is."""
    caplog.set_level(logging.INFO)
    yield bench
    assert min(map(bench.cards.free, bench.cards.devices)) >= 0
    bench.management.unload_all_models()
    bench.cards.natives.clear()
    bench.cards.working = 0
    bench.groups.retries.forget()
    bench.management.cleanup_models_gc()
    assert "memory leak" not in caplog.text


@pytest.fixture(scope="module")
def expected(bench: Desk) -> dict[str, torch.Tensor]:
    """Each expert's latents on an empty machine."""
    found = {}
    for name in bench.files:
        found[name] = bench.sample(bench.model(name))
        bench.management.unload_all_models()
    assert not torch.equal(found["high"], found["low"])
    return found


@pytest.fixture
def model(desk: Desk, expected: dict[str, torch.Tensor]) -> Any:
    """A MODEL whose group is resident."""
    model = desk.model()
    desk.load(model)
    assert desk.state(model) == "loaded"
    return model


# ---- room is made, and given


def test_sampling_makes_room_on_both_cards(desk: Desk, expected: dict[str, torch.Tensor]) -> None:
    text, other = desk.native(9, card=0), desk.native(20, card=1)
    desk.load(text, other)
    model = desk.model()
    assert torch.equal(desk.sample(model), expected["high"])
    assert desk.state(model) == "loaded"
    assert 0 < desk.held(text) < 9
    assert desk.held(other) < 9
    assert desk.cards.emptied, "cached blocks of ComfyUI are invisible to the ranks"


def test_whoever_loads_the_model_gets_room_on_both_cards(
    desk: Desk, expected: dict[str, torch.Tensor]
) -> None:
    """Custom nodes load a MODEL by itself, without what the samplers load with it."""
    other = desk.native(20, card=1)
    desk.load(other)
    model = desk.model()
    desk.management.load_models_gpu([model])
    assert desk.state(model) == "loaded"
    assert desk.held(other) < 9
    assert torch.equal(desk.sample(model), expected["high"])


def test_who_loads_the_weights_himself_gets_room_too(desk: Desk) -> None:
    """Past the memory manager, as a few custom nodes do."""
    first, second = desk.native(20, card=0), desk.native(20, card=1)
    desk.load(first, second)
    model = desk.model()
    model.patch_model()
    assert desk.state(model) == "loaded"
    assert desk.held(first) < 9 and desk.held(second) < 9
    assert model.current_loaded_device() == desk.cards.devices[0]
    model.unpatch_model()
    assert desk.state(model) == "parked"


def test_decoding_evicts_the_text_encoder_before_the_group(
    desk: Desk, expected: dict[str, torch.Tensor]
) -> None:
    text, vae = desk.native(9), desk.native(1)
    desk.load(text)
    model = desk.model()
    desk.sample(model)
    left = desk.held(text)
    loaded = desk.load_of(model)
    desk.load(vae, computing=6)
    assert desk.held(text) < left
    assert desk.state(model) == "loaded"
    desk.cards.working = 6 * GIB
    assert torch.equal(desk.sample(model), expected["high"])
    assert desk.load_of(model) is loaded


def test_a_clone_samples_without_a_reload(desk: Desk, model: Any, expected: dict[str, torch.Tensor]) -> None:
    loaded = desk.load_of(model)
    assert torch.equal(desk.sample(model.clone()), expected["high"])
    assert desk.load_of(model) is loaded


@pytest.mark.parametrize("card", [0, 1])
def test_a_native_model_on_either_card_parks_the_group(
    desk: Desk, model: Any, expected: dict[str, torch.Tensor], card: int
) -> None:
    native = desk.native(20, card)
    desk.load(native)
    assert desk.held(native) == 20
    assert desk.state(model) == "parked"
    assert model.loaded_size() == 0
    with _hidden(desk.files["high"]):
        assert torch.equal(desk.sample(model), expected["high"])
    assert desk.state(model) == "loaded"
    assert 0 < desk.held(native) < 9


@pytest.mark.parametrize("axis", ["ulysses", "replica"])
def test_ranks_with_the_same_weights_share_what_is_parked(desk: Desk, axis: str) -> None:
    model = desk.model(axis=axis)
    before = desk.sample(model)
    desk.load(desk.native(20))
    assert desk.state(model) == "parked"
    with _hidden(desk.files["high"]):
        assert torch.equal(desk.sample(model), before)


@contextlib.contextmanager
def _hidden(folder: Path) -> Iterator[None]:
    """What is used meanwhile comes from host RAM."""
    hidden = folder.rename(folder.with_name("hidden"))
    yield
    hidden.rename(folder)


def test_two_experts_take_turns(desk: Desk, expected: dict[str, torch.Tensor]) -> None:
    """As Wan 2.2 samples: both are in the graph, and only one of them fits."""
    experts = {name: desk.model(name) for name in EXPERTS}
    for _ in range(2):
        for name, other in (("high", "low"), ("low", "high")):
            assert torch.equal(desk.sample(experts[name]), expected[name])
            assert desk.state(experts[name]) == "loaded"
            assert desk.state(experts[other]) in ("parked", "")
    assert desk.state(experts["high"]) == "parked"


def test_a_card_without_a_part_cannot_evict_the_group(
    desk: Desk, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are on other cards than ComfyUI itself."""
    comfy_host = desk.host.pack("nodes.comfy_host")
    elsewhere = (torch.device("cpu", 1), torch.device("cpu", 2))
    monkeypatch.setattr(comfy_host, "torch_device_of", lambda device: elsewhere[device.index])
    monkeypatch.setattr(desk.cards, "devices", (torch.device("cpu", 0), *elsewhere))
    model = desk.model()
    assert [part.load_device for part in model.model.parts] == list(elsewhere)
    desk.load(model)
    monkeypatch.setattr(
        desk.cards, "get_free_memory", lambda _=None, torch_free_too=False: (0, 0) if torch_free_too else 0
    )
    monkeypatch.setattr(desk.management, "get_free_memory", desk.cards.get_free_memory)
    desk.management.free_memory(9 * GIB, torch.device("cpu", 0))
    assert desk.state(model) == "loaded"
    desk.management.free_memory(9 * GIB, torch.device("cpu", 1))
    assert desk.state(model) == "parked"


def test_a_pipelines_slot_is_parked_by_eviction_and_unloaded_by_unload_models(desk: Desk, model: Any) -> None:
    slot = model.model.sharded.slot  # to ComfyUI a pipeline's is not another
    managed = desk.host.pack("nodes.comfy_host").ManagedSlot(slot)
    desk.management.current_loaded_models.clear()
    managed.note_loaded(slot.ensure().weight_bytes)
    managed.detach(unpatch_all=False)
    assert desk.state(model) == "loaded"
    managed.partially_unload(desk.cards.devices[0], GIB)
    assert desk.state(model) == "parked"
    slot.ensure()
    managed.detach()
    assert desk.state(model) == "parked"
    slot.ensure()
    desk.management.unload_all_models()
    assert desk.state(model) == ""


# ---- given back for good


@pytest.mark.parametrize("parked", [False, True])
def test_free_unloads_for_good(
    desk: Desk, model: Any, expected: dict[str, torch.Tensor], parked: bool
) -> None:
    if parked:
        desk.load(desk.native(20))
    desk.management.unload_all_models()
    assert desk.state(model) == ""
    assert torch.equal(desk.sample(model), expected["high"])


@pytest.mark.parametrize("parked", [False, True])
def test_dropping_the_last_reference_unloads(
    desk: Desk, expected: dict[str, torch.Tensor], parked: bool
) -> None:
    """ComfyUI's model dies by its reference count alone: no cycle waits for the collector."""
    model = desk.model()
    desk.sample(model.clone())
    if parked:
        desk.load(desk.native(20))
    assert len(desk.cards.slots()) == 1
    alive = weakref.ref(model.model)
    with _no_collector():
        del model
        assert alive() is None
    wait_until(lambda: not desk.cards.slots(), 10, "the slot to be unloaded")
    assert not [one for one in desk.management.current_loaded_models if one.model not in desk.cards.natives]


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_model_asked_for_again_at_once_stays_where_it_is(
    desk: Desk, expected: dict[str, torch.Tensor]
) -> None:
    model = desk.model()
    desk.sample(model)
    loaded = desk.load_of(model)
    with desk.groups.groups()[0]._lock:  # the thread that unloads comes too late
        del model
        model = desk.model()
    assert torch.equal(desk.sample(model), expected["high"])
    assert desk.load_of(model) is loaded


def test_what_nothing_refers_to_is_gone_before_another_model_loads(
    desk: Desk, expected: dict[str, torch.Tensor]
) -> None:
    first = desk.model("high")
    desk.sample(first)
    with desk.groups.groups()[0]._lock:  # the thread that unloads comes too late
        del first
        second = desk.model("low")
        assert torch.equal(desk.sample(second), expected["low"])
        assert list(desk.cards.slots()) == [second.model.sharded.slot.name]


# ---- when something fails


def test_a_rank_out_of_memory_is_comfyuis_own_error(
    desk: Desk, model: Any, expected: dict[str, torch.Tensor]
) -> None:
    pids = desk.pids()
    _run_out_of_memory(desk, model)
    desk.management.unload_all_models()  # as ComfyUI's executor does
    assert desk.state(model) == ""
    assert torch.equal(desk.sample(model), expected["high"])
    assert desk.pids() == pids


def test_an_error_keeps_no_model_alive(desk: Desk, expected: dict[str, torch.Tensor]) -> None:
    model = desk.model()
    desk.sample(model)
    alive = weakref.ref(model.model)
    with _no_collector():
        _run_out_of_memory(desk, model)
        desk.management.unload_all_models()
        del model
        assert alive() is None


def _run_out_of_memory(desk: Desk, model: Any) -> str:
    """In truth: the ranks may take 8 MiB more, and the first layer of a huge picture wants 16. What is said."""
    with _limited(desk.pids()), pytest.raises(desk.management.OOM_EXCEPTION, match="Rank") as caught:
        desk.sample(model, side=512, cfg=1.0)
    told = str(caught.value)
    del caught  # its traceback holds this frame, which would hold it, and the model with it
    return told


@contextlib.contextmanager
def _limited(pids: list[int], mib: int = 8) -> Iterator[Callable[[], None]]:
    """Processes that may take `mib` more and no more, until it ends or is lifted."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_DATA) for pid in pids}

    def lift() -> None:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_DATA, limits)

    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_DATA, (_data_bytes(pid) + (mib << 20), resource.RLIM_INFINITY))
    try:
        yield lift
    finally:
        lift()


def _data_bytes(pid: int) -> int:
    """What counts for RLIMIT_DATA: private writable memory, not the shared buffers of the wire."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def test_an_out_of_memory_names_what_was_wanted_where_and_which_layout_needs_less(desk: Desk) -> None:
    model = desk.model(axis="ulysses")
    desk.load(model)
    told = _run_out_of_memory(desk, model)
    assert "ran out of memory while sampling: it wanted" in told
    assert len(told.splitlines()) == 3
    assert "Host RAM now" in told
    assert "Less memory is needed by tensor" in told
    assert "Any strategy but manual tries that by itself." in told
    assert desk.layout(model) == "ulysses 2"


def test_a_smaller_layout_is_tried_by_itself_and_said_on_the_node(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The out-of-memory is real; that the smaller layout has room is not: the limit is lifted when it is loaded."""
    large = {"side": 192, "steps": 1, "cfg": 1.0}
    expected = desk.sample(desk.model(axis="tensor"), **large)
    desk.management.unload_all_models()
    model = desk.model(strategy="prefer context")
    desk.load(model)
    assert desk.layout(model) == "ulysses 2"
    said: list[str] = []
    monkeypatch.setattr(desk.host.pack("nodes.comfy_host"), "say", lambda _, *lines: said.extend(lines))
    with _limited(desk.pids(), mib=1) as lift, monkeypatch.context() as patch:
        _before_load(desk, patch, lift)
        result = desk.sample(model, **large)
    assert desk.layout(model) == "tensor 2"
    assert "Out of memory in ulysses 2: now tensor 2" in said
    assert torch.equal(result, expected)
    assert desk.state(model) == "loaded" and len(desk.cards.slots()) == 1
    assert torch.equal(desk.sample(model.clone(), **large), expected)
    assert said.count("Out of memory in ulysses 2: now tensor 2") == 1
    newest = desk.groups.journal.incidents[0]
    assert (newest.kind, newest.title) == ("layout", "Ran with tensor 2 instead")
    assert newest.text == "ulysses 2 did not fit."


def _before_load(desk: Desk, patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    load = desk.host.pack("runtime.spec").Load
    group = type(desk.groups.groups()[0])
    call = group.call

    def watched(this: Any, request: Any, *more: Any, **others: Any) -> Any:
        if isinstance(request, load):
            act()
        return call(this, request, *more, **others)

    patch.setattr(group, "call", watched)


def test_no_room_in_the_smaller_layout_either_ends_the_prompt(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = desk.model(strategy="prefer context")
    desk.load(model)
    with monkeypatch.context() as patch:
        _limit_each_forward(desk, patch)
        with pytest.raises(desk.management.OOM_EXCEPTION) as caught:
            desk.sample(model, side=512, cfg=1.0)
        told = str(caught.value)
        del caught  # as in _run_out_of_memory
    assert desk.layout(model) == "tensor 2"
    assert "No layout of this model on these devices needs less memory than tensor 2." in told
    newest = desk.groups.journal.incidents[0]
    assert (newest.kind, newest.params.doing) == ("memory", "sampling")
    desk.management.unload_all_models()  # as ComfyUI's executor does


def _limit_each_forward(desk: Desk, patch: pytest.MonkeyPatch) -> None:
    """Not the load of another layout between two: its threads alone want more than there is."""
    forward = desk.host.pack("runtime.spec").Forward
    group = type(desk.groups.groups()[0])
    call = group.call

    def watched(this: Any, request: Any, *more: Any, **others: Any) -> Any:
        with _limited(desk.pids()) if isinstance(request, forward) else contextlib.nullcontext():
            return call(this, request, *more, **others)

    patch.setattr(group, "call", watched)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_encoders_and_vae_that_find_no_room_on_their_card_run_on_the_cpu(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No rank: what the ranks would answer is mocked."""
    spec, comfy_host = desk.host.pack("runtime.spec"), desk.host.pack("nodes.comfy_host")
    devices = (spec.Device(kind=kind, index=3, uuid="GPU-mock" * (kind == "cuda"), name="Mock"),)
    layout = spec.Layout(spec=spec.ParallelSpec(), devices=devices, reason="")
    model = spec.ModelSpec(path="a", pipeline_class="FluxPipeline", dtype="float32")
    pipeline = desk.host.pack("nodes.cables").ShardedPipeline(desk.groups.slot(layout, model))
    said: list[str] = []
    monkeypatch.setattr(comfy_host, "say", lambda _, *lines: said.extend(lines))
    asked: list[str] = []

    def mock_answer(way: str) -> str:
        asked.append(way)
        if way != "host":
            raise spec.RankOutOfMemory("Rank 0 ran out of memory.", rank=0)
        return "a picture"

    ways = ("", "tiles", "host")
    if kind == "cuda":
        assert pipeline.staged(mock_answer, ways) == ("a picture", "host")
        assert asked == ["", "tiles", "host"]
        assert said == [
            "Out of memory on rank 0 (GPU 3 Mock): now in tiles",
            "Out of memory on rank 0 (GPU 3 Mock): now on the CPU, which is slow",
        ]
    else:
        with pytest.raises(
            desk.management.OOM_EXCEPTION, match="Rank 0 ran out of memory.\nA smaller picture"
        ):
            pipeline.staged(mock_answer, ways)
        assert asked == ["", "tiles"]


def test_evicted_between_two_steps_it_asks_for_room_again(
    desk: Desk, model: Any, expected: dict[str, torch.Tensor]
) -> None:
    """`MockCards` checks that both cards have the room whenever the ranks load."""
    natives: list[Any] = []

    def needs_the_card(arguments: dict[str, Any]) -> torch.Tensor:
        if not natives:
            natives.append(desk.native(20))
            desk.load(*natives)
            assert desk.state(model) == "parked"
        return arguments["denoised"]

    stepping = model.clone()
    stepping.set_model_sampler_post_cfg_function(needs_the_card)
    assert torch.equal(desk.sample(stepping), expected["high"])
    assert desk.state(model) == "loaded"
    assert desk.held(natives[0]) < 9


def test_what_the_sampler_uses_itself_goes_last(desk: Desk) -> None:
    """Room for the group comes from what the running sampler does not need, as long as that is enough."""
    idle, used = desk.native(12), desk.native(3)
    desk.load(idle)
    desk.load(used)
    comfy_host = desk.host.pack("nodes.comfy_host")
    comfy_host.make_room([(desk.cards.devices[0], 20 * GIB)], lambda _: False)
    assert desk.held(used) == 3
    comfy_host.make_room([(desk.cards.devices[0], 23 * GIB)], lambda _: False)
    assert desk.held(used) < 3


def test_what_has_failed_three_times_is_not_loaded_for_again(
    desk: Desk, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks lose the slot each time: a request that fails on all of them, and would again."""
    model = desk.model()
    spec = desk.host.pack("runtime.spec")
    with monkeypatch.context() as patch:
        _lose_the_slot_before(desk, patch, spec.Forward)
        for attempt in range(3):
            with pytest.raises(Exception, match="is empty") as caught:
                desk.sample(model)
            assert ("failure 3 in a row" in str(caught.value)) == (attempt == 2)
        requests = _spy_on_requests(desk, patch)
        with pytest.raises(Exception, match="failed 3 times in a row and is not tried again for now"):
            desk.sample(model)
        assert requests == [], "nothing was loaded"
    assert desk.sample(model, side=16).shape[-1] == 16, "another size is tried"
    assert torch.equal(desk.sample(model), expected["high"]), "and that was a success"


def _lose_the_slot_before(desk: Desk, patch: pytest.MonkeyPatch, kind: type) -> None:
    group = type(desk.groups.groups()[0])
    call, unload = group.call, desk.host.pack("runtime.spec").Unload

    def spoiled(this: Any, request: Any, *more: Any, **others: Any) -> Any:
        if isinstance(request, kind):
            for connection in this._session.connections.values():
                connection.send(0, unload(slot=request.slot))
        return call(this, request, *more, **others)

    patch.setattr(group, "call", spoiled)


def test_a_cancelled_load_is_forgotten_on_the_ranks(
    desk: Desk, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user cancels while the last bytes are read: some ranks are through, and none may keep its part."""
    model = desk.model()
    alive = weakref.ref(model.model)
    requests = _spy_on_requests(desk, monkeypatch)

    def cancel(_: Any, progress: Any, __: Any) -> None:
        if progress.done == progress.total:
            raise desk.management.InterruptProcessingException

    with _no_collector(), monkeypatch.context() as patch:
        patch.setattr(desk.host.pack("nodes.comfy_host").NodeProgress, "report", cancel)
        with pytest.raises(desk.management.InterruptProcessingException):
            desk.load(model)
        assert requests == ["Load", "Unload"]
        assert desk.state(model) == ""
        del model
        assert alive() is None
    assert torch.equal(desk.sample(desk.model()), expected["high"])


def _spy_on_requests(desk: Desk, patch: pytest.MonkeyPatch) -> list[str]:
    group = type(desk.groups.groups()[0])
    call, seen = group.call, []

    def spy(this: Any, request: Any, *more: Any, **others: Any) -> Any:
        seen.append(type(request).__name__)
        return call(this, request, *more, **others)

    patch.setattr(group, "call", spy)
    return seen


def test_a_rank_that_dies_while_parking(desk: Desk, model: Any) -> None:
    """The last test here: it ends the group. To ComfyUI the memory is free, and nothing starts before the next use."""
    pids = desk.pids()
    os.kill(pids[1], signal.SIGSTOP)  # so that it is parking when it dies
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    desk.load(desk.native(20))
    assert desk.state(model) == ""
    assert model.loaded_size() == 0
    desk.management.unload_all_models()
    assert [rank["state"] for rank in desk.groups.snapshot()[0]["ranks"]] == ["stopped", "stopped"]
