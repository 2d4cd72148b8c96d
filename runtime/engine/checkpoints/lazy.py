"""Stands in for tensors while diffusers' converters rename, cut and join them: nothing is read or held.

Every piece is a weight source and a view of a meta tensor of its shape, so torch itself keeps the books of slices,
chunks and reshapes; at the end the view's strides say which box of the source holds the wanted part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...spec import Refusal
from .source import Index, WeightSource


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of one source, seen through a view of a meta tensor that has the source's shape."""

    source: WeightSource
    view: torch.Tensor

    def narrow(self, dim: int, start: int, length: int) -> _Piece:
        return _Piece(self.source, self.view.narrow(dim, start, length))

    def read(self, index: Index) -> torch.Tensor:
        """The part of the view at `index`: a view of what the source returns for the box around it."""
        wanted = self.view[index]
        tight = _box(self.source.shape, wanted)
        if tight is None:
            return self._read_rows(wanted)
        box, steps = tight
        part = self.source.read(box)
        strides = [times * part.stride(dim) if dim is not None else 1 for dim, times in steps]
        return part.as_strided(wanted.shape, strides, part.storage_offset())

    def _read_rows(self, wanted: torch.Tensor) -> torch.Tensor:
        """By whole rows of the source, for views that join its dims: small tables in another shape."""
        row = math.prod(self.source.shape[1:])
        last = wanted.storage_offset() + sum(
            (size - 1) * stride for size, stride in zip(wanted.shape, wanted.stride(), strict=True)
        )
        first = wanted.storage_offset() // row
        rest = (slice(0, size) for size in self.source.shape[1:])
        part = self.source.read((slice(first, last // row + 1), *rest)).contiguous()
        offset = part.storage_offset() + wanted.storage_offset() - first * row
        return part.as_strided(wanted.shape, wanted.stride(), offset)


def _box(shape: tuple[int, ...], view: torch.Tensor) -> tuple[Index, list[tuple[int | None, int]]] | None:
    """Where a view of a contiguous tensor of `shape` lies: one slice per dim of `shape`, and per dim of the view
    which dim it walks along and in steps of how many (None for a dim of size one).

    None when a dim of the view walks along several dims of `shape` at once.
    """
    contiguous = torch.empty(shape, device="meta").stride()
    starts, rest = [], view.storage_offset()
    for size, stride in zip(shape, contiguous, strict=True):
        starts.append(min(rest // stride, max(size - 1, 0)))
        rest -= starts[-1] * stride
    lasts = list(starts)
    steps: list[tuple[int | None, int]] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size <= 1:
            steps.append((None, 1))
            continue
        dim = next((d for d, one in enumerate(contiguous) if shape[d] > 1 and one <= stride), None)
        if dim is None or stride % contiguous[dim]:
            return None
        steps.append((dim, stride // contiguous[dim]))
        lasts[dim] += (size - 1) * steps[-1][1]
    if view.numel() == 0:
        return tuple(slice(start, start) for start in starts), steps
    if any(last >= size for last, size in zip(lasts, shape, strict=True)):
        return None
    return tuple(slice(start, last + 1) for start, last in zip(starts, lasts, strict=True)), steps


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor that remembers where its elements lie, and a weight source: pieces of sources joined along `dim`.

    Understands what moves elements: slices, chunk, split, narrow, select, unbind, reshape, flatten, unflatten,
    (un)squeeze, transpose, permute, cat and copies. Anything else raises Refusal with its name.
    """

    _pieces: tuple[_Piece, ...]
    _dim: int = 0

    @classmethod
    def of(cls, source: WeightSource) -> LazyTensor:
        return cls((_Piece(source, torch.empty(source.shape, device="meta")),))

    # ---- what a weight source offers

    @property
    def shape(self) -> torch.Size:
        sizes = list(self._pieces[0].view.shape)
        if len(self._pieces) > 1:
            sizes[self._dim] = sum(piece.view.shape[self._dim] for piece in self._pieces)
        return torch.Size(sizes)

    @property
    def item_bytes(self) -> int:
        return max(piece.source.item_bytes for piece in self._pieces)

    @property
    def where(self) -> str:
        return " and ".join(dict.fromkeys(piece.source.where for piece in self._pieces))

    @property
    def sources(self) -> tuple[WeightSource, ...]:
        """What it reads from."""
        return tuple(piece.source for piece in self._pieces)

    def read(self, index: Index) -> torch.Tensor:
        """The part at `index`; only pieces that it touches are read. One piece stays a view, several are joined."""
        if len(self._pieces) == 1:
            return self._pieces[0].read(index)
        wanted, parts, start = index[self._dim], [], 0
        for piece in self._pieces:
            size = piece.view.shape[self._dim]
            first, last = max(wanted.start - start, 0), min(wanted.stop - start, size)
            if first < last:
                inside = (*index[: self._dim], slice(first, last), *index[self._dim + 1 :])
                parts.append(piece.read(inside))
            start += size
        if not parts:
            return self._pieces[0].read((*index[: self._dim], slice(0, 0), *index[self._dim + 1 :]))
        if len({part.dtype for part in parts}) > 1:  # pieces of files that store them differently
            parts = [part.float() for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self._dim)

    # ---- what converters ask for

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _same(self, *_: object, **__: object) -> LazyTensor:
        """Copies and memory formats change no value."""
        return self

    clone = contiguous = detach = cpu = _same

    def narrow(self, dim: int, start: int, length: int) -> LazyTensor:
        """`length` elements from `start` along `dim`."""
        if not -self.ndim <= dim < self.ndim or not 0 <= start <= start + length <= self.shape[dim]:
            raise self._refusal(f"narrow({dim}, {start}, {length}) to the shape {tuple(self.shape)}")
        dim %= self.ndim
        if len(self._pieces) == 1 or dim != self._dim:
            return LazyTensor(tuple(p.narrow(dim, start, length) for p in self._pieces), self._dim)
        kept, before = [], 0
        for piece in self._pieces:
            size = piece.view.shape[dim]
            first, last = max(start - before, 0), min(start + length - before, size)
            if first < last:
                kept.append(piece.narrow(dim, first, last - first))
            before += size
        return LazyTensor(tuple(kept or [self._pieces[0].narrow(dim, 0, 0)]), dim)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
        """Like torch, but sizes that are those of another width are scaled to this one."""
        total = self.shape[dim]
        if isinstance(split_size, int):
            sizes = [min(split_size, total - start) for start in range(0, total, split_size)]
        else:
            sizes = self._scaled(split_size, total)
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def _scaled(self, sizes: Sequence[int], total: int) -> list[int]:
        """`sizes`, in proportion if they do not sum to `total`.

        Several converters of diffusers 0.42 name the sizes of the published width (Flux and Chroma 3072, Lumina 2
        2304 / 768 / 768). Proportions that are wrong for a model give a shape that does not fit its parameter.
        """
        if sum(sizes) == total and min(sizes) >= 0:
            return list(sizes)
        if min(sizes) < 0 or not sum(sizes) or any(size * total % sum(sizes) for size in sizes):
            raise self._refusal(f"split into {list(sizes)} of {total}")
        return [size * total // sum(sizes) for size in sizes]

    def chunk(self, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def unbind(self, dim: int = 0) -> tuple[LazyTensor, ...]:
        return tuple(self.select(dim, number) for number in range(self.shape[dim]))

    def select(self, dim: int, index: int) -> LazyTensor:
        return self._viewed("select", lambda view: view.select(dim, index))

    def __getitem__(self, index: Any) -> LazyTensor:
        items = index if isinstance(index, tuple) else (index,)
        if len(self._pieces) == 1:
            if not all(isinstance(item, int | slice | type(...)) for item in items):
                raise self._refusal("indexing with a tensor or a list")
            return self._viewed("indexing", lambda view: view[index])
        result = self
        for dim, item in enumerate(items):
            if not isinstance(item, slice):
                raise self._refusal("indexing of joined tensors")
            start, stop, step = item.indices(self.shape[dim])
            if step != 1:
                raise self._refusal("indexing in steps")
            result = result.narrow(dim, start, max(stop - start, 0))
        return result

    def reshape(self, *shape: Any) -> LazyTensor:
        return self._viewed("reshape", lambda view: view.view(*shape))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> LazyTensor:
        """Joins dims; two leading dims whose rows lie apart (heads cut out of a fused projection) become pieces."""
        end = end_dim % max(self.ndim, 1)
        joined = (*self.shape[:start_dim], math.prod(self.shape[start_dim : end + 1]), *self.shape[end + 1 :])
        try:
            return self.reshape(joined)
        except Refusal:
            if (start_dim, end) != (0, 1) or len(self._pieces) > 1:
                raise
            return _cat(self.unbind(0))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> LazyTensor:
        return self._viewed("unflatten", lambda view: view.unflatten(dim, sizes))

    def squeeze(self, *dims: int) -> LazyTensor:
        return self._viewed("squeeze", lambda view: view.squeeze(*dims))

    def unsqueeze(self, dim: int) -> LazyTensor:
        return self._viewed("unsqueeze", lambda view: view.unsqueeze(dim))

    def transpose(self, dim0: int, dim1: int) -> LazyTensor:
        return self._viewed("transpose", lambda view: view.transpose(dim0, dim1))

    def permute(self, *dims: Any) -> LazyTensor:
        return self._viewed("permute", lambda view: view.permute(*dims))

    def t(self) -> LazyTensor:
        return self._viewed("t", lambda view: view.t())

    T = property(t)

    def _viewed(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        """This tensor after an operation that only changes how its elements are seen."""
        if len(self._pieces) > 1:
            raise self._refusal(f"{name} of joined tensors")
        try:
            return LazyTensor((_Piece(self._pieces[0].source, change(self._pieces[0].view)),))
        except (RuntimeError, ValueError) as error:
            raise self._refusal(f"{name} ({error})") from error

    def _refusal(self, operation: str) -> Refusal:
        return Refusal(
            f"{self.where} cannot be converted.",
            f"diffusers' converter applies {operation}, and weights are only moved, never computed.",
            "Use this model as a diffusers folder.",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refusal(f"'{name}'")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """`torch.chunk(lazy, 3)` and the like become the methods of the same name."""
        name = getattr(func, "__name__", str(func))
        if name in ("cat", "concat", "concatenate"):
            return _cat(*args, **(kwargs or {}))
        first = next((arg for arg in args if isinstance(arg, LazyTensor)), None)
        if first is None or args[0] is not first:
            raise Refusal(
                "This checkpoint cannot be converted.",
                f"diffusers' converter applies torch.{name}, and weights are only moved, never computed.",
                "Use this model as a diffusers folder.",
            )
        return getattr(first, name)(*args[1:], **(kwargs or {}))


def _cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """`tensors` one after the other along `dim`; like torch, sizes along all other dims must be equal."""
    first = tensors[0]
    dim %= first.ndim
    for tensor in tensors:
        if not isinstance(tensor, LazyTensor):
            raise first._refusal("cat with a computed tensor")
        if len(tensor._pieces) > 1 and tensor._dim != dim:
            raise first._refusal("cat along two dims")
        if [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] != [*first.shape[:dim], *first.shape[dim + 1 :]]:
            raise first._refusal(f"cat of shapes {[tuple(tensor.shape) for tensor in tensors]}")
    return LazyTensor(functools.reduce(lambda done, tensor: done + tensor._pieces, tensors, ()), dim)
