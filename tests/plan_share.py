"""`python -m tests.plan_share [--json] [--tensor N]`: how much of each full-size model the fullest rank would hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence

from runtime.engine.loading import empty_model
from runtime.engine.plans import tensor_plan
from tests.parity.matrix import CASES
from tests.parity.model_case import ModelCase

LIMIT = 0.35


def share(case: ModelCase, tensor: int) -> float:
    """Parameters of the fullest rank of `tensor` equal ones, as a part of the full-size model's."""
    model, shares = empty_model(case.name, case.full), (1,) * tensor
    shards = tensor_plan(model, shares).shards(model)
    total, held = 0, [0] * tensor
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        total += count
        for rank in range(tensor):
            shard = shards.get(name)
            part = (
                count if shard is None else count // parameter.shape[shard.dim] * shard.length(rank, shares)
            )
            held[rank] += part
    return max(held) / total


def rows(names: Sequence[str], tensor: int) -> Iterator[dict[str, object]]:
    for name in names:
        yield {"family": name, "tensor": tensor, "share": round(share(CASES[name], tensor), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("family", nargs="*", default=sorted(CASES))
    arguments = parser.parse_args()
    for row in rows(arguments.family, arguments.tensor):
        print(
            json.dumps(row) if arguments.json else "{family:45} {tensor} {share:.3f}".format(**row),
            flush=True,
        )


if __name__ == "__main__":
    main()
