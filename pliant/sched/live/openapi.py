"""The description of the live scheduler's API, for tools that read OpenAPI: made from the forms that the client reads."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from pliant.sched.live.client import ClusterStatus, JobDetail, JobStatus, LogPart, Reserved
from pliant.sched.live.jobfile import JobSpec

_FORMS = (JobSpec, JobStatus, JobDetail, LogPart, ClusterStatus, Reserved)
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


@cache
def description() -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(form, "serialization") for form in _FORMS], ref_template="#/components/schemas/{model}"
    )
    refused = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    jobs = {
        "type": "object",
        "properties": {"jobs": {"type": "array", "items": _ref("JobStatus")}},
        "required": ["jobs"],
    }
    counts = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}
    missing = {"404": _says("There is no such job.", _ref("Refusal"))}
    paths = {
        "/jobs": {
            "get": _operation("All jobs.", {"200": _says("In the order of submission.", jobs)}),
            "post": _operation(
                "Submit a job.",
                {
                    "201": _says("It waits for devices, or starts.", _ref("JobStatus")),
                    "409": _says("There is, or was, a job of this name.", _ref("Refusal")),
                    "422": _says("It could never run, with the reason.", _ref("Refusal")),
                },
                body=_ref("JobSpec"),
            ),
        },
        "/jobs/{name}": {
            "get": _operation("A job and what happened to it.", {"200": _says("", _ref("JobDetail")), **missing}, [_NAME]),
            "delete": _operation(
                "End a job, in good order.",
                {"202": _says("It was told to, or is over already.", _ref("JobStatus")), **missing},
                [_NAME, _query("kill", "boolean", "End it at once, without a checkpoint.")],
            ),
        },
        "/jobs/{name}/logs": {
            "get": _operation(
                "What a job has printed.",
                {"200": _says("", _ref("LogPart")), **missing},
                [
                    _NAME,
                    _query("begin", "integer", "The first byte; `end` of the last answer."),
                    _query("wait_s", "number", "How long to wait for something new, at most 60."),
                ],
            )
        },
        "/cluster": {"get": _operation("Who has which devices.", {"200": _says("", _ref("ClusterStatus"))})},
        "/reserve": {
            "put": _operation(
                "Take devices for a serving tenant, or give them back.",
                {
                    "200": _says("No process of a job is on them any more.", _ref("Reserved")),
                    "422": _says("There are not as many.", _ref("Refusal")),
                },
                body=counts,
            )
        },
        "/healthz": {"get": {**_operation("Whether the server answers.", {"200": _says("", {"type": "object"})}), "security": []}},
        "/openapi.json": {"get": _operation("This description.", {"200": _says("", {"type": "object"})})},
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pliant serve",
            "version": "1",
            "description": "Jobs on a cluster whose devices come and go.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Refusal": refused},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _says(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _query(name: str, kind: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": {"type": kind}}


def _operation(
    summary: str,
    responses: dict[str, Any],
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    unauthorized = {"401": _says("The token is missing or wrong.", _ref("Refusal"))}
    operation: dict[str, Any] = {"summary": summary, "responses": {**responses, **unauthorized}}
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
