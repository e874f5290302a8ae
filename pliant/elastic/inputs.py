"""What a request to the config server says: its body, its query, its conditional headers.

Reads Starlette requests into plain values, or refuses with the reason. Bodies are bounded in
size and time, and JSON is taken strictly: what two readers could understand differently is no view.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from pliant.cluster import Worker
from pliant.elastic.client import MAX_HOLD_S
from pliant.errors import ConfigError

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0

T = TypeVar("T")


async def body_of(request: Request) -> bytes:
    """The whole body; 413 if it is too large, 408 if it does not come, 400 if it breaks off."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes: no view needs that much")
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection ended before the body did") from None
    return bytes(body)


async def check_no_body(request: Request) -> None:
    """Refuse a request that brings a body where none has a meaning."""
    # Whoever POSTs a view to /config means PUT; KungFu would forget the running view instead.
    if (await body_of(request)).strip():
        raise ConfigError(f"{request.method} {request.url.path} takes no body; to set a view, PUT it")


def decoded(body: bytes, decode: Callable[[object], T]) -> T:
    """What `decode` makes of the JSON in `body`; ConfigError if it is not strict JSON."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant, object_pairs_hook=_distinct)
    except RecursionError:
        raise ConfigError("the JSON is nested too deeply: a view needs three levels") from None
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    try:
        return decode(value)
    except RecursionError:  # from the repr in the reason
        raise ConfigError("the JSON is nested too deeply: a view needs three levels") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a key is given twice among {[key for key, _ in pairs]!r}")
    return value


def size_in(value: object) -> int:
    """The number in `{"size": 4}`."""
    size = value.get("size") if isinstance(value, dict) else None
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(f'{value!r:.60} names no size: give {{"size": 4}} or ?size=4')
    return size


def query(request: Request, name: str) -> str | None:
    """The value of a query parameter; None where it is not given. Given twice, both, so that no parser takes it."""
    values = request.query_params.getlist(name)
    return ",".join(values) if values else None


def wait_s(request: Request, name: str = "wait") -> float:
    """How long a GET may be held; 0 where it does not ask, MAX_HOLD_S where it asks for more."""
    text = query(request, name)
    if text is None:
        return 0.0
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise ConfigError(f"{name}={text:.40}: give seconds, such as 30 or 0.5; at most {MAX_HOLD_S:g} count")
    return min(float(text), MAX_HOLD_S)


def number_in(request: Request, name: str) -> int | None:
    """The whole number in a query parameter; None where it is not given."""
    text = query(request, name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{name}={text:.40}: give a whole number from 0, once")
    return int(text)


def check_finish(value: object) -> None:
    """Refuse a body of /finish that says more than a reason."""
    if not isinstance(value, dict) or not set(value) <= {"Reason"}:
        raise ConfigError(f'{value!r:.60} says more than that the job is done: give no body, or {{"Reason": "..."}}')


def settled_in(value: object) -> tuple[Worker, int]:
    """The worker and the number of replicas in `{"Worker": {"Host": "10.0.0.1", "Port": 10000}, "Replicas": 4}`."""
    example = '{"Worker": {"Host": "10.0.0.1", "Port": 10000}, "Replicas": 4}'
    if not isinstance(value, dict) or not {"Worker"} <= set(value) <= {"Worker", "Replicas"}:
        raise ConfigError(f"{value!r:.60} names no worker that has settled: give {example}")
    replicas = value.get("Replicas", 0)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 0 <= replicas < 2**31:
        raise ConfigError(f'"Replicas" {replicas!r:.60} is not a number from 0: give {example}')
    return Worker.from_json(value["Worker"]), replicas


def loss_in(value: object) -> tuple[Worker, str, Worker | None]:
    """A notice of a loss, with the worker that says so under "By" where it was one."""
    by = value.get("By") if isinstance(value, dict) else None
    rest = {key: item for key, item in value.items() if key != "By"} if isinstance(value, dict) else value
    worker, reason = notice_in(rest)
    return worker, reason, None if by is None else Worker.from_json(by)


def notice_in(value: object) -> tuple[Worker, str]:
    """The worker and the reason in `{"Worker": {"Host": "10.0.0.1", "Port": 10000}, "Reason": "exit 1"}`."""
    example = '{"Worker": {"Host": "10.0.0.1", "Port": 10000}, "Reason": "why, if you like"}'
    if not isinstance(value, dict) or not {"Worker"} <= set(value) <= {"Worker", "Reason"}:
        raise ConfigError(f"{value!r:.60} names no worker: give {example}")
    reason = value.get("Reason", "")
    if not isinstance(reason, str):
        raise ConfigError(f'"Reason" {reason!r:.60} is not text: give {example}')
    return Worker.from_json(value["Worker"]), reason


def version_in(request: Request, header: str) -> int | str | None:
    """The version in a conditional header: None if absent, `*` for any."""
    text = ",".join(request.headers.getlist(header)).strip()
    if not text:
        return None
    if text == "*":
        return "*"
    matched = re.fullmatch(r'(?:W/)?"([0-9]{1,18})"|([0-9]{1,18})', text)
    if matched is None:
        raise ConfigError(f'{header}: {text:.40} is not one version: give the ETag of an answer, such as "3"')
    return int(matched[1] or matched[2])
