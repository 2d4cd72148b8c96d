"""Lazy tensors: every operation that converters use, against torch on the same numbers, without reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.engine.checkpoints.lazy import LazyTensor
from runtime.engine.checkpoints.source import Index
from tests.support.refusals import refused


class Source:
    """A tensor in memory that notes what is read of it."""

    item_bytes = 4

    def __init__(self, tensor: torch.Tensor, where: str = "'key' in 'file'"):
        self.tensor, self.where = tensor, where
        self.boxes: list[Index] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, index: Index) -> torch.Tensor:
        assert len(index) == self.tensor.ndim and all(type(one.stop) is int for one in index)
        self.boxes.append(index)
        return self.tensor[index]

    @property
    def elements(self) -> int:
        return sum(self.tensor[box].numel() for box in self.boxes)


def table(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def whole(shape: Any) -> Index:
    return tuple(slice(0, size) for size in shape)


Operation = Callable[[Any], Any]
# Each is applied to a [12, 6] tensor and to a lazy one.
OPERATIONS: dict[str, Operation] = {
    "nothing": lambda x: x,
    "copies": lambda x: x.clone().contiguous().detach(),
    "chunk": lambda x: x.chunk(3, dim=0)[1],
    "chunk of torch": lambda x: torch.chunk(x, 3, dim=0)[2],
    "uneven chunk": lambda x: x.chunk(5)[2],
    "split": lambda x: torch.split(x, [2, 4, 6], dim=0)[1],
    "split by size": lambda x: x.split(5)[2],
    "split columns": lambda x: x.split([2, 4], dim=1)[1],
    "narrow": lambda x: x.narrow(0, 3, 4).narrow(1, 1, 2),
    "narrow of torch": lambda x: torch.narrow(x, 1, 2, 3),
    "rows": lambda x: x[3:9],
    "half": lambda x: x[x.shape[0] // 2 :],
    "columns": lambda x: x[:, 1:3],
    "every other row": lambda x: x[::2],
    "last rows": lambda x: x[-3:],
    "one row": lambda x: x[4],
    "one column": lambda x: x[:, 2],
    "dots": lambda x: x[..., 1:2],
    "select": lambda x: x.select(1, 3),
    "reshape": lambda x: x.reshape(3, -1),
    "reshape with a tuple": lambda x: x.reshape((2, 6, 6)),
    "view": lambda x: x.view(4, 3, 6),
    "unflatten": lambda x: x.unflatten(0, (2, 3, 2)),
    "unflatten and flatten": lambda x: x.unflatten(0, (4, 3)).flatten(0, 1),
    "flatten": lambda x: x.flatten(),
    "unbind": lambda x: x.unbind(1)[5],
    "heads out of a fused projection": lambda x: x.unflatten(0, (2, 3, 2)).unbind(dim=1)[1].flatten(0, 1),
    "squeeze": lambda x: x[3:4].squeeze(0),
    "squeeze of torch": lambda x: torch.squeeze(x[:, 2:3], 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose": lambda x: x.transpose(0, 1),
    "T": lambda x: x.T,
    "t": lambda x: x[2:5].t(),
    "permute": lambda x: x.unflatten(0, (3, 4)).permute(1, 0, 2),
    "swap halves": lambda x: torch.cat([x.chunk(2)[1], x.chunk(2)[0]], dim=0),
    "cat of one": lambda x: torch.cat([x.chunk(3)[1]]),
    "cat of columns": lambda x: torch.cat((x[:, 4:], x[:, :4]), dim=-1),
    "cat of cats": lambda x: torch.cat([torch.cat([x[8:], x[:2]]), x[2:5]]),
    "rows of joined": lambda x: torch.cat([x[8:], x[:8]])[2:7],
    "columns of joined": lambda x: torch.cat([x[8:], x[:8]])[:, 1:4],
    "chunk of joined": lambda x: torch.cat([x[8:], x[:8]]).chunk(2)[1],
    "nothing of joined": lambda x: torch.cat([x[8:], x[:8]])[3:3],
}


def all_parts(shape: torch.Size) -> list[Index]:
    """The whole, thirds of each dim, one element, and nothing."""
    found = [
        whole(shape),
        tuple(slice(size // 2, size // 2 + 1) for size in shape),
        tuple(slice(0, 0) for _ in shape),
    ]
    for dim, size in enumerate(shape):
        bounds = [size * rank // 3 for rank in range(4)]
        for first, last in zip(bounds, bounds[1:], strict=False):
            found.append((*whole(shape[:dim]), slice(first, last), *whole(shape[dim + 1 :])))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_what_torch_gives(name: str) -> None:
    source = Source(table(12, 6))
    lazy, real = OPERATIONS[name](LazyTensor.of(source)), OPERATIONS[name](source.tensor)
    assert source.boxes == [], "read while tracing"
    assert lazy.shape == real.shape and lazy.ndim == real.ndim and lazy.numel() == real.numel()
    for index in all_parts(real.shape):
        assert torch.equal(lazy.read(index), real[index]), index


def test_small_shapes_keep_their_places() -> None:
    bias = LazyTensor.of(Source(table(1, 5, 1, 1)))[0, :, 0, 0]
    assert bias.shape == (5,) and bias.read((slice(1, 3),)).tolist() == [1.0, 2.0]
    scalar = LazyTensor.of(Source(torch.tensor(7.0)))
    assert scalar.shape == () and scalar.read(()).item() == 7.0
    assert LazyTensor.of(Source(table(12))).reshape(6, -1).read((slice(1, 2), slice(0, 2))).tolist() == [
        [2.0, 3.0]
    ]


def test_only_the_wanted_part_of_a_piece_is_read() -> None:
    source = Source(table(12, 6))
    swapped = torch.cat(LazyTensor.of(source).chunk(2)[::-1])
    part = swapped.read((slice(4, 6), slice(0, 6)))
    assert (
        source.elements == 12
        and part.untyped_storage().data_ptr() == source.tensor.untyped_storage().data_ptr()
    )
    swapped.read((slice(4, 8), slice(2, 5)))
    assert source.boxes[1:] == [(slice(10, 12), slice(2, 5)), (slice(0, 2), slice(2, 5))]


def test_pieces_stored_differently_are_joined_in_fp32() -> None:
    first, second = table(2, 3).to(torch.float8_e4m3fn), table(2, 3).to(torch.bfloat16)
    joined = torch.cat([LazyTensor.of(Source(first)), LazyTensor.of(Source(second))])
    assert torch.equal(joined.read(whole((4, 3))), torch.cat([first.float(), second.float()]))


def test_what_it_stands_for_is_known() -> None:
    one, two = Source(table(2, 2), "'a' in 'm'"), Source(table(2, 2), "'b' in 'm'")
    joined = torch.cat([LazyTensor.of(one), LazyTensor.of(two), LazyTensor.of(one)])
    assert joined.where == "'a' in 'm' and 'b' in 'm'" and joined.item_bytes == 4 and len(joined) == 6
    assert joined.size() == (6, 2) and joined.size(0) == 6 and joined.dim() == 2


def test_sizes_of_another_width_are_scaled() -> None:
    """FLUX.1's converter splits at 3072, whatever the width."""
    parts = torch.split(LazyTensor.of(Source(table(14, 2))), (3072, 3072, 3072, 12288), dim=0)
    assert [part.shape[0] for part in parts] == [2, 2, 2, 8]
    assert torch.equal(parts[3].read(whole((8, 2))), table(14, 2)[6:])


@pytest.mark.parametrize("sizes", [(3, 4), (16, -4), (0, 0)])
def test_sizes_that_fit_in_no_proportion_are_refused(sizes: tuple[int, int]) -> None:
    with refused("'key'", "split"):
        LazyTensor.of(Source(table(12, 2))).split(sizes)


NOT_UNDERSTOOD: dict[str, tuple[Operation, str]] = {
    "a sum": (lambda x: torch.add(x, 1), "add"),
    "a method": (lambda x: x.mean(), "mean"),
    "a cast": (lambda x: x.to(torch.float32), "to"),
    "a stack": (lambda x: torch.stack([x, x]), "stack"),
    "an index of a list": (lambda x: x[[0, 1]], "indexing"),
    "a cat with numbers": (lambda x: torch.cat([x, torch.ones(1, 6)]), "cat"),
    "a cat of two widths": (lambda x: torch.cat([x, x[:, :2]]), "cat"),
    "a cat along two dims": (lambda x: torch.cat([torch.cat([x, x]), torch.cat([x, x])], dim=1), "cat"),
    "a reshape that would copy": (lambda x: x.t().reshape(-1), "reshape"),
    "a reshape of joined": (lambda x: torch.cat([x, x]).reshape(-1), "reshape"),
    "a row of joined": (lambda x: torch.cat([x, x])[0], "indexing"),
    "steps of joined": (lambda x: torch.cat([x, x])[::2], "steps"),
    "a narrow beyond the end": (lambda x: x.narrow(0, 8, 8), "narrow"),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_operations_that_are_not_understood_are_named(name: str) -> None:
    operation, said = NOT_UNDERSTOOD[name]
    with refused(said):
        operation(LazyTensor.of(Source(table(12, 6))))


def test_arithmetic_is_an_error() -> None:
    with pytest.raises(TypeError, match="LazyTensor"):
        LazyTensor.of(Source(table(2, 2))) * 2
