"""HTTP to a server on this machine: never through a proxy, whatever the environment says."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HttpError(OSError):
    """The server answered with a status of 400 or more."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        super().__init__(f"{url} answered {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body


def request(url: str, body: object = None, *, timeout: float = 30.0) -> bytes:
    """GET, or POST `body` as JSON where there is one. Raises HttpError, or OSError where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    try:
        with _OPENER.open(urllib.request.Request(url, data, headers), timeout=timeout) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        raise HttpError(url, error.code, error.read()) from None
