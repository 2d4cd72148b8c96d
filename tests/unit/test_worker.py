"""What a rank does with its output, and how it calls what it is asked for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from runtime import wire
from runtime.spec import Decode, DenoiserCall, Encode, Forward, Load, ModelSpec, ParallelSpec, Ping, Sample
from runtime.worker import Output, _operation, set_imports_apart
from tools import ROOT

WRITES = """
import logging, sys, warnings
from pathlib import Path
from runtime.worker import _redirect_output
_redirect_output(Path({log!r}))
print("printed", flush=True)
logging.warning("logged")
warnings.warn("warned")
sys.stderr.write("one \\udcff and \\u00e9\\n" * 3000)
assert sys.stderr.fileno() == 2 and not sys.stderr.isatty()
raise SystemExit(7)
"""


def run_with(log: Path) -> int:
    return subprocess.run([sys.executable, "-c", WRITES.format(log=str(log))], cwd=ROOT).returncode


def test_all_output_goes_to_the_log_and_a_surrogate_is_no_error(tmp_path: Path) -> None:
    assert run_with(tmp_path / "log") == 7
    text = (tmp_path / "log").read_text()
    for word in ("printed", "logged", "warned", "\\udcff and \u00e9"):
        assert word in text, word
    assert text.count("one ") == 3000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_costs_the_lines_and_nothing_else() -> None:
    """/dev/full answers every write as a full disk does."""
    assert run_with(Path("/dev/full")) == 7


def test_a_log_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    assert run_with(tmp_path / "missing" / "log") == 7


def test_what_is_printed_to_a_full_disk_counts_as_written() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        assert Output(descriptor).write("some words") == 10
    finally:
        os.close(descriptor)


# ---- operations


class Cyclic:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def test_the_collector_passes_over_what_was_imported_and_still_finds_a_slot() -> None:
    try:
        slot, imported = Cyclic(), Cyclic()
        left = weakref.ref(slot)
        set_imports_apart({"held": slot})
        del slot
        gc.collect()
        assert left() is None
        kept = weakref.ref(imported)
        set_imports_apart({})
        del imported
        gc.collect()
        assert kept() is not None, "all that was imported is looked through"
    finally:
        gc.unfreeze()


def operation(request: object, **tensors: torch.Tensor) -> tuple[str, object]:
    return _operation(wire.Message(1, request, tensors))  # type: ignore[arg-type]


def sampling(**changes: int) -> Sample:
    fields = {"seed": 1, "steps": 4, "width": 64, "height": 64, "batch_size": 1, **changes}
    return Sample(slot="a", guidance=1.0, denoise=1.0, preview=False, **fields)  # type: ignore[arg-type]


def test_runs_are_the_same_operation_whatever_their_seed_but_not_of_another_size() -> None:
    assert operation(sampling()) == operation(sampling(seed=2, steps=8))
    assert operation(sampling()) != operation(sampling(width=128))
    assert operation(sampling())[0] == "sampling"


def test_the_first_step_of_a_run_brings_what_is_kept_and_is_the_same_operation() -> None:
    call = DenoiserCall(arguments={})
    first = Forward(slot="a", calls=(call,), keep=(2,))
    later = Forward(slot="a", calls=(call,))
    latent, text = torch.zeros(1, 4), torch.zeros(1, 9, 9)
    assert operation(first, **{"1": latent, "2": text}) == operation(later, **{"1": latent})
    assert operation(later, **{"1": latent}) != operation(later, **{"1": torch.zeros(1, 8)})


def test_what_varies_from_file_to_file_is_measured_anew_each_time() -> None:
    model = ModelSpec(path="/a", pipeline_class="", dtype="float32")
    assert operation(Load(slot="a", model=model, parallel=ParallelSpec())) == ("loading", None)
    assert operation(Ping()) == ("answering", None)


def test_encoding_and_decoding_are_known_by_their_slot_and_size() -> None:
    assert operation(Encode(slot="a", prompt="one")) == operation(Encode(slot="a", prompt="two"))
    assert operation(Encode(slot="a", prompt="one")) != operation(Encode(slot="b", prompt="one"))
    one, two = torch.zeros(1, 4, 8, 8), torch.zeros(2, 4, 8, 8)
    assert operation(Decode(slot="a"), samples=one) == operation(Decode(slot="a"), samples=two)
    assert operation(Decode(slot="a"), samples=one) != operation(
        Decode(slot="a"), samples=torch.zeros(1, 4, 9, 8)
    )
