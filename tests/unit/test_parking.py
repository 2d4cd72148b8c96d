"""Parking as one rank sees it: what goes to host RAM, what is dropped and read again, and what is given back when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime import wire
from runtime.engine import mesh
from runtime.engine.backend import Backend, pack
from runtime.environment import RankEnvironment
from runtime.spec import (
    Body,
    Decode,
    DenoiserCall,
    Done,
    Encode,
    Failure,
    Forward,
    Forwarded,
    Load,
    ModelSpec,
    ParallelSpec,
    Park,
    Parked,
    Progress,
    Sample,
    SlotInfo,
    TensorRef,
    Unload,
)
from runtime.worker import Worker, _failure
from tests.support.models import make_flux, randomise

ALONE = RankEnvironment(rank=0, local_rank=0, world_size=1)
TENSORS = {
    "1": torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1)),
    "2": torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(2)),
    "3": torch.randn(1, 32, generator=torch.Generator().manual_seed(3)),
    "4": torch.tensor([0.5]),
    "5": torch.zeros(4, 3),
    "6": torch.zeros(3, 3),
}


class MockBackend(Backend):
    """Mock of what a test decides: whether host RAM has room, and what the other ranks say. Notes what it is asked."""

    def __init__(self, place: RankEnvironment) -> None:
        super().__init__(torch.device("cpu"), place)
        self.room = True
        self.another_fails = False
        self.events: list[str] = []

    def any_rank(self, flag: bool) -> bool:
        return flag or self.another_fails

    def host_has_room(self, nbytes: int) -> bool:
        self.asked = nbytes
        return self.room

    def return_cache(self) -> None:
        self.events.append("return_cache")


class MockConnection:
    """Mock of the socket: keeps what is sent."""

    def __init__(self, events: list[str]) -> None:
        self.pool = wire.BufferPool(shared=False)
        self.sent: list[tuple[Body, dict[str, torch.Tensor]]] = []
        self._events = events

    def send(self, _call: int, body: Body, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self._events.append(type(body).__name__)
        self.sent.append((body, tensors or {}))


class Rank(Worker):
    """A worker without threads, serving one request after the other."""

    def __init__(
        self, model: Path, place: RankEnvironment = ALONE, parallel: ParallelSpec | None = None
    ) -> None:
        self.model = ModelSpec(path=str(model), pipeline_class="", dtype="float32")
        self.parallel = parallel or ParallelSpec()
        self.place, self.slots, self.cancelled_call = place, {}, 0
        self.backend = self.mock = MockBackend(place)
        self.pulse = self.mock.pulse
        self.connection: Any = MockConnection(self.mock.events)

    def ask(self, request: Body, tensors: dict[str, torch.Tensor] | None = None) -> Body:
        self.connection.sent.clear()
        self.mock.events.clear()
        self._serve_one(wire.Message(1, request, tensors or {}))
        return self.connection.sent[-1][0]

    def load(self) -> bool:
        """Whether the file was read for it."""
        answer = self.ask(Load(slot="a", model=self.model, parallel=self.parallel))
        assert isinstance(answer, SlotInfo), answer
        return any(isinstance(body, Progress) for body, _ in self.connection.sent)

    def forward(self, keep: tuple[int, ...] = (), without: str = "") -> torch.Tensor | None:
        names = (
            "hidden_states",
            "encoder_hidden_states",
            "pooled_projections",
            "timestep",
            "img_ids",
            "txt_ids",
        )
        arguments: dict[str, Any] = {
            name: TensorRef((number,), batched=number < 5) for number, name in enumerate(names, 1)
        }
        call = DenoiserCall(arguments=arguments, rows=((0, 1),))
        given = {name: tensor for name, tensor in TENSORS.items() if name != without}
        answer = self.ask(Forward(slot="a", calls=(call,), keep=keep), given)
        if not isinstance(answer, Forwarded):
            return None
        return self.connection.sent[-1][1]["0"].clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parking") / "transformer"
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    randomise(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def rank(folder: Path) -> Iterator[Rank]:
    """A rank that holds the model, alone."""
    with _loaded(Rank(folder)) as rank:
        yield rank


@contextmanager
def _loaded(rank: Rank) -> Iterator[Rank]:
    """With the model; the process group is a fake one."""
    mesh._mesh.cache_clear()  # of another test's process group
    dist.init_process_group("fake", store=FakeStore(), rank=rank.place.rank, world_size=rank.place.world_size)
    try:
        with torch.no_grad():
            assert rank.load()
            yield rank
    finally:
        dist.destroy_process_group()
        mesh._mesh.cache_clear()


def test_what_is_parked_comes_back_without_the_file(rank: Rank) -> None:
    before = rank.forward()
    assert rank.ask(Park(slot="a")) == Parked(in_host_memory=True)
    assert not rank.load()
    assert torch.equal(rank.forward(), before)


def _no_room(rank: Rank, _: pytest.MonkeyPatch) -> None:
    rank.mock.room = False


def _another_rank_fails(rank: Rank, _: pytest.MonkeyPatch) -> None:
    rank.mock.another_fails = True


def _moving_fails(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("mock: no page-locked memory")

    patch.setattr(rank.mock, "to_host", fails)


@pytest.mark.parametrize("trouble", [_no_room, _another_rank_fails, _moving_fails])
def test_what_cannot_be_parked_is_dropped_and_read_again(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, trouble: Any
) -> None:
    before = rank.forward()
    with monkeypatch.context() as patch:
        trouble(rank, patch)
        assert rank.ask(Park(slot="a")) == Parked(in_host_memory=False)
        assert not rank.slots
    rank.mock.room, rank.mock.another_fails = True, False
    assert rank.load()
    assert torch.equal(rank.forward(), before)


def test_a_slot_that_finds_no_room_to_come_back_is_dropped(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rank.forward()
    rank.ask(Park(slot="a"))

    def to(*_: object) -> None:
        raise torch.OutOfMemoryError("mock: the device is full")

    monkeypatch.setattr(rank.slots["a"].transformer, "to", to)  # type: ignore[attr-defined]
    answer = rank.ask(Load(slot="a", model=rank.model, parallel=ParallelSpec()))
    assert isinstance(answer, Failure)
    assert answer.kind == "memory"
    assert not rank.slots
    assert rank.load()
    assert torch.equal(rank.forward(), before)


def test_a_rank_that_parked_reads_the_file_where_another_has_lost_its_part(rank: Rank) -> None:
    before = rank.forward()
    rank.ask(Park(slot="a"))
    answers = itertools.chain([True], itertools.repeat(False))
    rank.mock.any_rank = lambda _: next(answers)  # type: ignore[method-assign]
    assert rank.load()
    assert torch.equal(rank.forward(), before)


@pytest.mark.parametrize("axis", ["replica", "ulysses"])
@pytest.mark.parametrize("number", [0, 1])
def test_of_ranks_with_the_same_weights_one_keeps_them(folder: Path, axis: str, number: int) -> None:
    place = RankEnvironment(rank=number, local_rank=number, world_size=2)
    with _loaded(Rank(folder, place, ParallelSpec(**{axis: 2}))) as rank:
        parameters = list(rank.slots["a"].transformer.parameters())  # type: ignore[attr-defined]
        shapes, whole = [p.shape for p in parameters], sum(p.nbytes for p in parameters)
        assert rank.ask(Park(slot="a")) == Parked(in_host_memory=True)
        assert rank.mock.asked == whole
        assert sum(p.nbytes for p in parameters) == (0 if number else whole)
        assert not rank.load()
        assert [p.shape for p in parameters] == shapes


def test_a_parked_slot_runs_nothing_and_parks_once(rank: Rank) -> None:
    rank.ask(Park(slot="a"))
    for request in (Park(slot="a"), Forward(slot="a", calls=())):
        answer = rank.ask(request)
        assert isinstance(answer, Failure)
        assert answer.kind == "empty"


# ---- pipelines


class PipelineRank(Rank):
    """The rank of a whole pipeline; `picture` runs it from the prompt to the picture."""

    def __init__(
        self, model: Path, place: RankEnvironment = ALONE, parallel: ParallelSpec | None = None
    ) -> None:
        super().__init__(model, place, parallel)
        self.model = ModelSpec(path=str(model), pipeline_class="FluxPipeline", dtype="float32")

    def picture(self) -> torch.Tensor:
        text = self._tensors(Encode(slot="a", prompt="a red circle on blue"))
        latent = self._tensors(SAMPLE, text)
        return self._tensors(Decode(slot="a"), latent)["images"]

    def _tensors(
        self, request: Body, tensors: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        answer = self.ask(request, tensors)
        assert isinstance(answer, Done), answer
        return {name: tensor.clone() for name, tensor in self.connection.sent[-1][1].items()}


SAMPLE = Sample(
    slot="a", seed=3, steps=2, guidance=3.5, width=32, height=32, batch_size=1, denoise=1.0, preview=False
)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("parking") / "flux", seed=1)


def test_a_parked_pipeline_comes_back_without_its_files(flux: Path) -> None:
    with _loaded(PipelineRank(flux)) as rank:
        assert isinstance(rank, PipelineRank)
        before = rank.picture()
        assert rank.ask(Park(slot="a")) == Parked(in_host_memory=True)
        for request in (Encode(slot="a", prompt=""), SAMPLE, Decode(slot="a"), Park(slot="a")):
            answer = rank.ask(request, {"samples": torch.zeros(1, 4, 4, 4)})
            assert isinstance(answer, Failure)
            assert answer.kind == "empty"
        assert not rank.load()
        assert torch.equal(rank.picture(), before)


def test_a_pipeline_for_which_the_host_has_no_room_is_read_again(flux: Path) -> None:
    with _loaded(PipelineRank(flux)) as rank:
        assert isinstance(rank, PipelineRank)
        before = rank.picture()
        rank.mock.room = False
        assert rank.ask(Park(slot="a")) == Parked(in_host_memory=False)
        assert not rank.slots
        assert rank.load()
        assert torch.equal(rank.picture(), before)


@pytest.mark.parametrize("number", [0, 1])
def test_of_a_pipelines_ranks_with_the_same_weights_one_keeps_them(flux: Path, number: int) -> None:
    place = RankEnvironment(rank=number, local_rank=number, world_size=2)
    with _loaded(PipelineRank(flux, place, ParallelSpec(ulysses=2))) as rank:
        parameters = list(rank.slots["a"].transformer.parameters())
        shapes, whole = [p.shape for p in parameters], sum(p.nbytes for p in parameters)
        assert rank.ask(Park(slot="a")) == Parked(in_host_memory=True)
        assert sum(p.nbytes for p in parameters) == (0 if number else whole)
        assert not rank.load()
        assert [p.shape for p in parameters] == shapes


def test_kept_tensors_go_with_the_weights(rank: Rank) -> None:
    rank.forward(keep=(2, 3))
    assert set(rank.slots["a"].kept) == {2, 3}  # type: ignore[attr-defined]
    rank.ask(Park(slot="a"))
    assert not rank.slots["a"].kept  # type: ignore[attr-defined]


def test_a_failed_call_keeps_nothing(rank: Rank) -> None:
    """The host forgets what it sent, and sends it again."""
    assert rank.forward(keep=(2, 3), without="1") is None
    assert not rank.slots["a"].kept  # type: ignore[attr-defined]
    assert rank.forward(keep=(2, 3)) is not None


@pytest.mark.parametrize(
    "request_", [Forward(slot="a", calls=()), Park(slot="a"), Unload(slot="a"), Park(slot="b")]
)
def test_caches_are_given_back_before_the_answer(rank: Rank, request_: Body) -> None:
    """ComfyUI measures what is free as soon as it hears it."""
    rank.ask(request_)
    assert rank.mock.events[-2] == "return_cache"
    assert rank.mock.events[-1] in ("Forwarded", "Parked", "Done", "Failure")


def test_the_cpus_out_of_memory_is_known_as_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert _failure(caught.value).kind == "memory"


def test_packed_weights_take_little_more_than_their_size() -> None:
    """torch rounds what it page-locks up to powers of two; here each chunk is one."""
    shapes = [(3072, 96), (1537, 64), (5,), (), (0, 4), (700, 512), *[(33, 7)] * 40]
    dtypes = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]
    tensors = [
        torch.randn(shape).to(dtypes[n % 3]) if shape else torch.tensor(1.5) for n, shape in enumerate(shapes)
    ]
    copies = [tensor.clone() for tensor in tensors]
    pack(tensors, pin=False, chunk=1 << 18)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), copy.reshape(-1).view(torch.uint8))
    chunks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert all(size.bit_count() == 1 for size in chunks.values())
    assert sum(chunks.values()) <= sum(t.nbytes for t in copies) * 1.5
