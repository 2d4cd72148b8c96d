"""`make serve`: a real ComfyUI with the pack and the demo model in the foreground, until Ctrl-C.

Models, outputs and settings live in .cache/serve/ and stay there from one time to the next.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from tools import CACHE, comfy_source
from tools.base_directory import BaseDirectory
from tools.comfy import Server, ServerError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arguments", nargs="*", help="more arguments for ComfyUI, after --")
    more = parser.parse_args().arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
    base = BaseDirectory.create(CACHE / "serve")
    server = Server(base, arguments=["--preview-method", "latent2rgb", *more], echo=True)
    try:
        with server:
            print(f"\nComfyUI is up: {server.url}   (Ctrl-C ends it)\n", flush=True)
            while server.running:
                time.sleep(0.2)
            print("the server ended by itself", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        print("\nstopped", flush=True)
    except (comfy_source.SourceError, ServerError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    if server.left_behind:
        print("these processes outlived the server:", *server.left_behind, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
