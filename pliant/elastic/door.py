"""The door of our HTTP servers, and the form of their answers: JSON, one line, and the metrics' text."""

from __future__ import annotations

import hmac
import json
from collections import Counter
from collections.abc import Mapping

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Door:
    """Lets in who knows the token (anybody, where there is none; `/health` and `/healthz` always), and counts what is answered."""

    def __init__(self, app: ASGIApp, token: str, answers: Counter[int]) -> None:
        self._app = app
        self._authorization = f"Bearer {token}".encode() if token else None
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[message["status"]] += 1
            await send(message)

        app: ASGIApp = self._app if self._may_pass(scope) else _UNAUTHORIZED
        await app(scope, receive, counted)

    def _may_pass(self, scope: Scope) -> bool:
        if self._authorization is None or scope["path"] in ("/health", "/healthz"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._authorization)


def json_answer(
    value: Mapping[str, object],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    background: BackgroundTask | None = None,
) -> Response:
    """`value` as the body of an answer."""
    # ASCII on purpose: a reason may quote half of a surrogate pair, which UTF-8 cannot carry.
    body = json.dumps(value, separators=(",", ":")) + "\n"
    return Response(body, status, headers, "application/json", background)


_UNAUTHORIZED = json_answer(
    {"error": "this server needs its token: send `Authorization: Bearer TOKEN`"}, 401, {"WWW-Authenticate": "Bearer"}
)


def metric_lines(name: str, kind: str, text: str, values: Mapping[str, int]) -> list[str]:
    """One metric in Prometheus' text form; `values` by label."""
    samples = [f"{name}{labels} {value}" for labels, value in values.items()]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
