"""A tensor that the ranks keep is found again by its bytes, whatever holds them, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from runtime import kept
from runtime.kept import KeptTensors
from tests.support.threads import one_torch_thread

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
# Ways to hold a tensor of [6, 8, 12]: whole rows, rows that are no whole words, and rows that are none.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "one number": lambda t: t[0, 0, 0],
    "odd row": lambda t: t[0, 0, :5],
    "odd rows": lambda t: t[:, :, :7],
    "shifted rows": lambda t: t[:, :, 1:9],
    "some channels": lambda t: t[:, 2:],
    "every second row": lambda t: t[:, ::2],
    "every second column": lambda t: t[..., ::2],
    "transposed": lambda t: t.transpose(0, 2),
    "expanded": lambda t: t[:1].expand(4, -1, -1),
    "expanded columns": lambda t: t[..., :1].expand(-1, -1, 8),
    "nothing": lambda t: t[:0],
}


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


def numbers(dtype: torch.dtype = torch.bfloat16, *shape: int) -> torch.Tensor:
    """Values of all kinds that `dtype` has."""
    drawn = torch.randn(shape or (6, 8, 12), generator=torch.Generator().manual_seed(5)) * 3
    return torch.complex(drawn, drawn + 1).to(dtype) if dtype.is_complex else drawn.to(dtype)


def keep(held: KeptTensors, *tensors: torch.Tensor) -> list[int]:
    """The numbers of tensors that must be new."""
    found = [held.number(tensor) for tensor in tensors]
    assert all(is_new for _, is_new in found)
    return [number for number, _ in found]


# ---- found again


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_content_is_found_again_in_another_tensor(layout: str) -> None:
    held, view = KeptTensors(), LAYOUTS[layout]
    for dtype in DTYPES:
        [number] = keep(held, view(numbers(dtype)))
        for again in (view(numbers(dtype)), view(numbers(dtype)).clone(), view(numbers(dtype)).contiguous()):
            assert held.number(again) == (number, False)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "nothing"])
@pytest.mark.parametrize("place", [0, -1])
def test_one_changed_byte_makes_another_tensor(layout: str, place: int) -> None:
    held, view = KeptTensors(), LAYOUTS[layout]
    for dtype in DTYPES:
        keep(held, view(numbers(dtype)))
        changed = view(numbers(dtype)).clone(memory_format=torch.contiguous_format)
        changed.view(-1).view(torch.uint8)[place] ^= 1
        keep(held, changed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_compared_on_a_gpu_tells_every_byte(dtype: torch.dtype) -> None:
    """Integers: neither a NaN nor a zero's sign counts for more or less than any other bit."""
    plain = numbers(dtype)
    own = kept._integers(plain.view(-1)).clone()
    assert kept._alike(own, kept._integers(numbers(dtype).view(-1)))
    for place in (0, -1):
        changed = plain.clone()
        changed.view(-1).view(torch.uint8)[place] ^= 1
        assert not kept._alike(own, kept._integers(changed.view(-1)))


def test_it_is_found_in_any_order_and_among_alike() -> None:
    held = KeptTensors()
    texts = [numbers() + one for one in range(4)]
    found = keep(held, *texts)
    assert len(set(found)) == 4
    for place in (2, 0, 3, 3, 1):
        assert held.number(texts[place].clone()) == (found[place], False)


def test_what_is_no_number_is_found_again() -> None:
    held = KeptTensors()
    broken = numbers()
    broken[0, 0, 0] = float("nan")
    [number] = keep(held, broken)
    assert held.number(broken.clone()) == (number, False)


def test_a_negative_zero_is_another_tensor() -> None:
    held = KeptTensors()
    keep(held, torch.zeros(8), -torch.zeros(8))


def test_a_conjugated_view_stands_for_its_values() -> None:
    held = KeptTensors()
    complex_numbers = numbers(torch.complex64)
    [number] = keep(held, complex_numbers.conj())
    assert held.number(complex_numbers.conj().resolve_conj()) == (number, False)
    assert held.number(complex_numbers)[1]


def test_tensors_of_inference_mode_and_of_autograd_are_alike() -> None:
    held = KeptTensors()
    with torch.inference_mode():
        [number] = keep(held, numbers())
    assert held.number(numbers().requires_grad_()) == (number, False)


# ---- taken for another


def test_a_tensor_changed_in_place_is_noticed() -> None:
    """ComfyUI and custom nodes may write into a conditioning between two steps."""
    held = KeptTensors()
    text = numbers()
    [number] = keep(held, text)
    text[3, 4, 5] += 1
    assert held.number(text)[1]
    assert held.number(numbers()) == (number, False)


def test_dtype_and_shape_and_device_count() -> None:
    held = KeptTensors()
    zeros = torch.zeros(4, 6, dtype=torch.float16)
    keep(
        held,
        zeros,
        zeros.to(torch.bfloat16),
        zeros.view(torch.int16),
        zeros.view(6, 4),
        zeros.view(1, 4, 6),
        zeros.view(-1),
        zeros.to("meta"),
    )


# ---- forgotten


def test_nothing_is_dropped_within_the_limits() -> None:
    held = KeptTensors()
    keep(held, *(torch.full((4,), one) for one in range(kept.MOST)))
    assert held.dropped(in_use=()) == ()


def test_beyond_the_count_the_longest_unused_go_first() -> None:
    held = KeptTensors()
    tensors = [torch.full((4,), one) for one in range(kept.MOST + 3)]
    found = keep(held, *tensors)
    held.number(tensors[0])  # used again: now the last to go
    assert held.dropped(in_use=()) == tuple(found[1:4])
    assert held.dropped(in_use=()) == ()
    assert held.number(tensors[0]) == (found[0], False)
    number, is_new = held.number(tensors[1])
    assert is_new
    assert number not in found


def test_beyond_the_bytes_the_longest_unused_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 100)
    held = KeptTensors()
    found = keep(held, *(torch.full((size,), 7, dtype=torch.uint8) for size in (40, 50, 60, 30)))
    assert held.dropped(in_use=()) == tuple(found[:2])


def test_what_is_in_use_stays_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 100)
    held = KeptTensors()
    found = keep(held, *(torch.full((size,), 7, dtype=torch.uint8) for size in (90, 20, 80)))
    assert held.dropped(in_use=[found[0], found[2]]) == (found[1],)
    assert held.number(torch.full((90,), 7, dtype=torch.uint8)) == (found[0], False)


def test_another_load_of_the_slot_forgets_everything() -> None:
    held = KeptTensors()
    first, second = object(), object()
    held.belong_to(first)
    [number] = keep(held, numbers())
    held.belong_to(first)
    assert held.number(numbers()) == (number, False)
    held.belong_to(second)
    [again] = keep(held, numbers())
    assert again != number


def test_a_number_never_means_two_tensors() -> None:
    """A rank may hold tensors of several slots, and of a load that was forgotten here."""
    one, other = KeptTensors(), KeptTensors()
    found = [*keep(one, numbers()), one.passing(), *keep(other, numbers()), other.passing()]
    assert len(set(found)) == 4
