"""`make doctor`: examines this machine and prints a report without private data, for a first run or a bug report.

Run it in any Python that has the pack's requirements: `python -m tools.doctor [--devices 0,1] [--json]`. Ends with 0
if everything works, 1 if something is wrong, 2 if nothing could be examined.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import msgspec

from runtime.doctor.examine import examine
from runtime.doctor.findings import NOT_EXAMINED
from runtime.doctor.privacy import anonymous
from runtime.doctor.text import as_plain_data, report
from runtime.spec import Refusal
from tools import CACHE, ROOT, comfy_source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="auto", help="auto, cpu, or cards in PCI order such as 0,1")
    parser.add_argument("--json", action="store_true", help="the findings as one JSON object")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        findings = examine(arguments.devices, _comfyui_version(), say=_say)
    except Refusal as refusal:
        print(anonymous(str(refusal)), file=sys.stderr)
        return NOT_EXAMINED
    except KeyboardInterrupt:
        print("doctor: stopped", file=sys.stderr)
        return 130
    if arguments.json:
        print(
            msgspec.json.encode(as_plain_data(findings)).decode()
        )  # unlike json, null for what is no number
    else:
        print(report(findings), end="")
    return findings.status


def _say(line: str) -> None:
    print(f"{line} ...", file=sys.stderr, flush=True)


def _comfyui_version() -> str:
    """Of the ComfyUI that the pack is installed in, else of the developer's copy."""
    places = [
        Path(__file__).absolute().parents[3],
        ROOT.parent.parent,
        CACHE / f"comfyui-{comfy_source.VERSION}",
    ]
    return next((found for place in places if (found := comfy_source.version(place))), "")


if __name__ == "__main__":
    sys.exit(main())
