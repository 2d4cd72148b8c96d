"""The shared vocabulary as plain data: layouts, devices, models, requests, replies and errors.

Both sides of the socket import this module and nothing in it imports anything heavier than msgspec, so a rank can
dial the host before torch is loaded. Naming: *axis* is one dimension of the device mesh (replica, stage, ring,
ulysses, tensor), *degree* its size; *dim* is only ever a tensor dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

AXES = ("replica", "stage", "ring", "ulysses", "tensor")
STRATEGIES = ("auto", "prefer tensor", "prefer context", "manual")
ATTENTION_BACKENDS = ("auto", "native", "flash", "cudnn", "sage")
DTYPES = ("auto", "bfloat16", "float16", "float32")


# --------------------------------------------------------------------------------------------------------------
# Errors


class ShardedError(Exception):
    """Anything this pack reports to its user."""

    # ComfyUI's report shows the module, which for a custom node is a path on the user's disk.
    __module__ = "sharded"


class Refusal(ShardedError):
    """Something that cannot be done, found before loading or sampling.

    The message has three lines, as the nodes show it: what cannot be done, why, and the nearest thing that can.
    """

    __module__ = "sharded"

    def __init__(self, what: str, why: str, instead: str):
        super().__init__(f"{what}\n{why}\n{instead}")
        self.what, self.why, self.instead = what, why, instead


class Cancelled(ShardedError):
    """The call was cancelled; every rank stopped at the same boundary and is ready for the next call."""

    __module__ = "sharded"


class RankError(ShardedError):
    """A rank failed or died during a call.

    The message has at most three lines, as that of a Refusal: what happened, why, and what to do. `detail` is
    everything else that is known, for the log and the panel: the rank's traceback, memory, the last lines of its log.
    `rank` is the culprit, `kind` is one of "refused", "cancelled", "memory", "empty" (a slot it does not
    hold), "collectives" (the ranks do not reach each other), "failed", "died", "gone" (dead before the call
    reached it), "silent", "stuck", "start", "given up" (it has failed too often to be tried now), "stopped" (by a
    person).
    """

    __module__ = "sharded"

    def __init__(
        self, message: str, *, detail: str = "", rank: int = -1, kind: str = "failed", traceback: str = ""
    ):
        super().__init__(message)
        self.what, self.why, self.instead = ([*message.split("\n", 2), "", ""])[:3]
        self.detail = detail.strip("\n")
        self.is_logged = False
        self.incident: object = None  # what the panel is told if it comes to that
        self.rank, self.kind, self.traceback = rank, kind, traceback

    @property
    def whole(self) -> str:
        """The message with the details."""
        return f"{self}\n\n{self.detail}".rstrip("\n")

    def explain(self, why: str, instead: str) -> None:
        """Say something better in the second and third line; what stood there goes to the details."""
        before = [line for line in (self.why, self.instead) if line]
        self.detail = "\n\n".join(filter(None, ("\n".join(before), self.detail)))
        self._tell(why, instead)

    def _tell(self, why: str, instead: str) -> None:
        self.why, self.instead = why, instead
        self.args = ("\n".join(filter(None, (self.what, why, instead))),)


class RankOutOfMemory(RankError):
    """A rank ran out of device memory.

    `tried` is what it wanted and `allocated` what it held in tensors, in bytes; 0 is unknown.
    """

    __module__ = "sharded"

    def __init__(self, message: str, *, rank: int = -1, tried: int = 0, allocated: int = 0, **others: str):
        super().__init__(message, rank=rank, kind="memory", **others)
        self.tried, self.allocated = tried, allocated

    def advise(self, advice: str) -> None:
        """Say what can be done first in the third line."""
        self._tell(self.why, " ".join(filter(None, (advice, self.instead))))


# --------------------------------------------------------------------------------------------------------------
# Layouts and devices


def divide(units: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Whole units for each rank, as near to `shares` as whole numbers allow, and at least one each.

    Equal shares differ by one at most, the larger ones first: 38 over four is 10, 10, 9, 9. Raises ValueError when
    there are fewer units than ranks.
    """
    if units < len(shares):
        raise ValueError(f"{units} cannot be divided over {len(shares)} ranks")
    spare, total = units - len(shares), sum(shares)
    # The exact part of each beyond its one, in units of 1 / total; what is left over goes to the largest remainders.
    wanted = [max(0, units * share - total) for share in shares]
    total_wanted = sum(wanted) or 1
    counts = [spare * part // total_wanted for part in wanted]
    remainders = sorted(range(len(shares)), key=lambda rank: (-(spare * wanted[rank] % total_wanted), rank))
    for rank in remainders[: spare - sum(counts)]:
        counts[rank] += 1
    return tuple(1 + count for count in counts)


class ParallelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The one description of a layout: the degree of every axis, the attention backend, and how weights are cut.

    `tensor_shares` are the relative shares of the tensor axis's ranks, () for equal ones; `tensor_plan` is a user's
    own tensor plan as JSON text, "" for the plan that fits the model.
    """

    replica: int = 1
    stage: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    attention: str = "native"
    tensor_shares: tuple[int, ...] = ()
    tensor_plan: str = ""

    @property
    def shares(self) -> tuple[int, ...]:
        """The relative share of each rank of the tensor axis."""
        return self.tensor_shares or (1,) * self.tensor

    @property
    def context(self) -> int:
        """Over how many ranks the sequence is divided."""
        return self.ring * self.ulysses

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees().values())

    def degrees(self) -> dict[str, int]:
        """Degree of each axis, outermost first: the shape of the device mesh."""
        return {axis: getattr(self, axis) for axis in AXES}

    def describe(self) -> str:
        """The layout in words, such as "tensor 2 x ulysses 2", "tensor 2 in shares 24:16" or "one rank"."""
        split = {axis: f"{axis} {degree}" for axis, degree in reversed(self.degrees().items()) if degree > 1}
        if self.tensor_shares and "tensor" in split:
            split["tensor"] += f" in shares {':'.join(map(str, self.tensor_shares))}"
        return " x ".join(split.values()) or "one rank"


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for on a Parallel Config node; the planner turns it into a `Layout`.

    `degrees` counts only under the strategy "manual". `devices` is "auto", "cpu", or physical cards in PCI order,
    such as "0,1,3". `tensor_plan` is a user's own plan as JSON text, from a Tensor Plan node.
    """

    strategy: str = "auto"
    degrees: ParallelSpec = ParallelSpec()
    devices: str = "auto"
    attention: str = "auto"
    tensor_plan: str = ""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device that one rank can own. `index` is the physical card in PCI order (for "cpu" just a count).

    `taken_bytes` are held by other programs than this host and its groups, as far as the driver tells.
    `peers` are the indices of the cards it reaches directly (NVLink, or PCIe with peer access); None is unknown.
    """

    kind: str
    index: int
    uuid: str = ""
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    taken_bytes: int = 0
    peers: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """What identifies the device across processes: two groups never share one."""
        return f"{self.kind}:{self.uuid or self.index}"

    @property
    def label(self) -> str:
        """The device as people read it."""
        return f"GPU {self.index} {self.name}".rstrip() if self.kind == "cuda" else f"CPU {self.index}"


def model_name(slot: str) -> str:
    """What people call the model of a slot: "flux-dev" of "flux-dev-0123abcd"."""
    return slot.rpartition("-")[0] or slot


def describe_devices(devices: Sequence[Device]) -> str:
    """Devices in few words: "GPU 0-3 NVIDIA L40", "GPU 0 NVIDIA L40 and GPU 1, 3 NVIDIA A40", "the CPU"."""
    if all(device.kind == "cpu" for device in devices):
        return "the CPU"
    by_name: dict[str, list[int]] = {}
    for device in devices:
        by_name.setdefault(device.name, []).append(device.index)
    return " and ".join(f"GPU {_ranges(sorted(them))} {name}".rstrip() for name, them in by_name.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in few words: three or more in a row as "0-3"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def in_gigabytes(nbytes: int) -> str:
    """A size as ComfyUI writes it: GB are 2**30 bytes."""
    return f"{nbytes / 2**30:.1f} GB"


def readable_bytes(nbytes: int) -> str:
    """A size that may be small: MB, which are 2**20 bytes, below a GB."""
    return in_gigabytes(nbytes) if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MB"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was accepted for a model: one device per rank, and the reason in a sentence."""

    spec: ParallelSpec
    devices: tuple[Device, ...]
    reason: str

    def describe(self) -> str:
        """Ranks, layout and devices, such as "4 ranks, tensor 2 x ulysses 2 on GPU 0-3 NVIDIA L40"."""
        count = self.spec.world_size
        ranks = f"{count} ranks, " if count > 1 else ""
        return f"{ranks}{self.spec.describe()} on {describe_devices(self.devices)}"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner needs to know of a pipeline folder, read from its configs and headers.

    `head_groups` are the key and value heads where several attention heads share one, 0 where each has its own.
    `tokens` is the length of the sequence for a picture of 1024x1024, 0 if unknown: sizes come after the layout.
    """

    path: str
    pipeline_class: str
    transformer_class: str
    heads: int
    transformer_bytes: int
    split_bytes: int  # of the transformer, what the tensor axis divides
    encoder_bytes: int
    vae_bytes: int
    stored_dtype: str
    version: str
    head_groups: int = 0
    tokens: int = 0

    @property
    def units(self) -> int:
        """What attention is divided in: heads, or groups of heads that share their keys and values."""
        return self.head_groups or self.heads


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model for a slot: where it lies on this machine, the dtype to hold it in, and the state of its files.

    With a `pipeline_class` it is a whole pipeline in a diffusers folder; without one a transformer alone, in a single
    file or a folder. `replaced` are modules of a transformer that calls may replace (see `DenoiserCall`).
    """

    path: str
    pipeline_class: str
    dtype: str
    version: str = ""
    rank_bytes: int = 0  # of the transformer on one rank, as far as the headers tell
    replaced: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------------------
# Requests: host -> every rank


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Load a model into a slot. Reply: SlotInfo."""

    slot: str
    model: ModelSpec
    parallel: ParallelSpec


class Encode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Encode a prompt. Reply tensors of rank 0: `prompt_embeds` [1, T, D], `pooled` [1, P].

    `on_host` computes in host RAM: after the device had no room for it.
    """

    slot: str
    prompt: str
    on_host: bool = False


class Sample(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run the denoising loop.

    Tensors: `prompt_embeds` [1, T, D], `pooled` [1, P], optionally `latent` [B, C, h, w] in VAE space. Progress:
    one per step, with `preview` [B, C, h, w] (the predicted clean latent in model space) if asked for. Reply tensor
    of rank 0: `samples` [B, C, h, w] float32 in VAE space.
    """

    slot: str
    seed: int
    steps: int
    guidance: float
    width: int
    height: int
    batch_size: int
    denoise: float
    preview: bool


class Decode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode tensor `samples` [B, C, h, w] in VAE space. Reply tensor: `images` [B, H, W, 3] float32 in 0..1.

    `tiled` decodes a large picture in tiles, which take less memory than all of it and differ at their blended seams.
    `on_host` as in Encode.
    """

    slot: str
    tiled: bool = False
    on_host: bool = False


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a call: the tensors of these numbers, joined along `dim` if there are several.

    A number is the name of a tensor in the frame, or one that the ranks keep from an earlier frame. `batched`: dim 0
    is the batch, or a multiple of it, unless its size is 1. `tokens`: dim 1 follows the picture's tokens, and each
    rank of a context axis takes its own part of it.
    """

    numbers: tuple[int, ...]
    dim: int = 0
    batched: bool = True
    tokens: bool = False


class DenoiserCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a transformer, as data.

    Keys of `arguments` are keyword arguments; a dotted key is an entry of a dict or, by number, of a list. Modules
    named in `inputs` get that first argument instead of the model's, those in `outputs` answer that instead of
    computing (as a tuple if there are several), and those in `skipped` hand back the arguments named there. `rows`
    are the first and last + 1 row of the batch for each replica; equal numbers leave a replica out.
    """

    arguments: dict[str, TensorRef | bool | int | float | str | None]
    inputs: dict[str, TensorRef] = {}
    outputs: dict[str, tuple[TensorRef, ...]] = {}
    skipped: dict[str, tuple[str, ...]] = {}
    rows: tuple[tuple[int, int], ...] = ()


class Forward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run a transformer once for each call. Tensors: by number; those in `keep` stay on the ranks until dropped.

    `anew` drops all that is kept first: the host knows of none.

    Reply: Forwarded, from the first rank of each replica with tensors named by the call's place, its rows only.
    """

    slot: str
    calls: tuple[DenoiserCall, ...]
    anew: bool = False
    keep: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()


class Verify(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run one call on the whole model, on rank 0 alone, where that has room for it.

    Reply: Verified, with tensor `reference` if it was run. Keeps and drops nothing.
    """

    slot: str
    call: DenoiserCall


class Park(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Move a slot's weights off the devices: into host RAM if that has room, else away. Reply: Parked."""

    slot: str


class Unload(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Empty a slot and give its memory back. Unknown slots are no error."""

    slot: str


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask for each rank's memory. Reply: Memory."""


EXCHANGES = ("all_reduce", "all_gather", "all_to_all", "ring")  # the kinds of collectives that layouts use


class Measure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Time each kind of EXCHANGES with messages of `sizes` bytes, and check what arrives. Reply: Measured.

    Progress: "measuring", one for each kind and size, in the order of the kinds.
    """

    sizes: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer every tensor with each byte inverted: shows that both directions of the wire carry every byte."""


class Cancel(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stop the call that this frame's number names, at the next boundary, on all ranks together. No reply."""


Request = Load | Encode | Sample | Decode | Forward | Verify | Park | Unload | Stats | Measure | Ping | Cancel


# --------------------------------------------------------------------------------------------------------------
# Replies: rank -> host


class Memory(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Memory of one rank in bytes; None is unknown, never zero."""

    weights: int | None = None
    reserved: int | None = None
    device_used: int | None = None
    device_total: int | None = None
    host: int | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What each rank says every second, unasked, in frames of call 0: that it lives, and how far it has come.

    `beat` counts these messages. `doing` is the operation in a word ("starting", "loading", "sampling", ...), "" while
    the rank is idle. `progress` is a count that grows with bytes read, blocks finished and steps made, and
    `collectives` the number of collectives entered in this call; both only compare, and on CUDA they are the device's.
    `slowest` is the longest time in seconds between two advances of `progress` in this operation so far, 0.0 while
    it warms up and nothing can be said about it.
    """

    memory: Memory
    beat: int
    doing: str
    progress: int
    collectives: int
    slowest: float


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The rank has joined the process group. `versions` by package name."""

    pid: int
    device: str
    versions: dict[str, str]


class SlotInfo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a rank holds after Load. Sizes in bytes on this rank; factors are pixels per latent cell.

    All but the first two are of pipelines.
    """

    weight_bytes: int
    seconds: float
    latent_channels: int = 0
    vae_factor: int = 0
    size_multiple: int = 0
    text_width: int = 0
    pooled_width: int = 0
    takes_guidance: bool = False


class Forwarded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The calls of a Forward that this rank took part in: their place, begin and end in seconds.

    The clock is the machine's monotonic one, so that the figures of all ranks compare.
    """

    spans: tuple[tuple[int, float, float], ...] = ()


class Verified(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The whole model's answer is in the frame. `own_error` is how far rounding alone moves it, as max_rel.

    `missing_bytes` is not 0 where rank 0 has no room for the whole model; then nothing was run.
    """

    own_error: float = 0.0
    missing_bytes: int = 0


class Parked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Whether the slot's weights are in host RAM; if not, they are gone."""

    in_host_memory: bool


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective as one rank saw it: seconds of one with messages of `nbytes`, and did all of it arrive?"""

    kind: str
    nbytes: int
    seconds: float
    right: bool


class Measured(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What one rank measured. `arithmetic` is how far its device is from double precision on the CPU, as max_rel."""

    exchanges: tuple[Exchange, ...]
    arithmetic: float
    libraries: dict[str, str]


class Progress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How far a call has come. Loading counts bytes of this rank, sampling steps, decoding images."""

    phase: str
    done: int
    total: int


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The call ended on this rank; results are in the frame's tensors."""


class Failure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The call failed on this rank. `kind` as in RankError."""

    kind: str
    message: str
    traceback: str = ""


Reply = (
    Memory
    | Heartbeat
    | Ready
    | SlotInfo
    | Forwarded
    | Verified
    | Parked
    | Measured
    | Progress
    | Done
    | Failure
)
Body = Request | Reply


class GroupFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank reads from the group's private directory at start."""

    address: str
    token: str
    devices: tuple[Device, ...]
