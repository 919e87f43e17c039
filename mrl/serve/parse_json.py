"""Parses a long body of JSON in a process of its own, so no other client waits for it.

`json.loads` holds the interpreter's lock until it is done, which takes seconds for tens of megabytes. The server starts
this file with the body as standard input. It imports nothing but the standard library, and starts in 20 ms.
"""

from __future__ import annotations

import json
import marshal
import sys
from typing import Any

MAX_VALUES = 2**21
"""Values of one body: the server takes over the result, and holds that lock meanwhile."""


def parse_body_json(body: bytes) -> tuple[int, Any]:
    """Returns (200, the value), or the status and the line of a refusal."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        return 400, f"the body has more than {MAX_VALUES} values"
    try:
        return 200, json.loads(body)
    except RecursionError:
        return 400, "the body is nested too deeply"
    except ValueError:
        return 400, "the body is no JSON"


if __name__ == "__main__":
    marshal.dump(parse_body_json(sys.stdin.buffer.read()), sys.stdout.buffer)
