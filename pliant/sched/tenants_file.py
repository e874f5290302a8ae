"""The file of tenants: their names, weights, quotas, priorities and tokens, with all mistakes told at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pliant.errors import reason
from pliant.sched.tenants import OTHERS, Tenant
from pliant.tokens import token_hash
from pliant.yaml_source import KeyPath, YamlSource, name_error, validate

SHA256 = re.compile(r"[0-9a-fA-F]{64}")
NO_HASH = (
    "token_sha256: use 64 hexadecimal digits, as `printf %s \"$(cat FILE)\" | sha256sum` prints them of a file with the token"
)
"""It does not repeat what is there: somebody may have written the token itself."""


class TenantEntry(BaseModel):
    """What the file says of one tenant."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    quota: dict[str, Annotated[int, Field(ge=0)]] = {}
    priority: int = 0
    token_file: str = ""
    token_sha256: str = ""


def read_tenants(path: Path, devices: Mapping[str, int], *, with_tokens: bool) -> tuple[Tenant, ...]:
    """Read a file of tenants for a cluster with these devices; if there are none, quotas are not compared with them.

    If `with_tokens`, each tenant but `others` needs a token; else tokens are not read.

    Raises:
        ConfigError: one line for each mistake, with file and line number.
    """
    source = YamlSource.read(path)
    said, wrong = source.values(), dict[KeyPath, str]()
    entries: dict[str, TenantEntry] = {}
    for name in source.keys:
        given = said.get(name, {})
        if refused := name_error(name):
            wrong[(name,)] = f"tenant {refused}"
        if not isinstance(given, Mapping):
            wrong[(name,)] = (
                f"tenant {name} {given!r:.60}: use a mapping, as in {name}: {{weight: 2, quota: {{cpu: 2}}}}"
            )
            continue
        entry, found = validate(TenantEntry, given)
        if ("token_sha256",) in found:
            found["token_sha256",] = NO_HASH
        wrong |= {(name, *place): text for place, text in found.items()}
        entries[name] = entry or TenantEntry()
    wrong = {**dict(_wrong_quotas(entries, devices)), **wrong}
    tokens: dict[str, str] = {}
    for name, entry in entries.items() if with_tokens else ():
        token, mistake = _token(name, entry, path.absolute().parent)
        twice = next((other for other, known in tokens.items() if token and known == token), "")
        if twice:
            mistake = f"the token of {name} is that of {twice}, too: give each its own"
        if mistake and not any(place[:1] == (name,) and "token" in str(place[-1]) for place in wrong):
            wrong[(name, "token_sha256" if entry.token_sha256 else "token_file")] = mistake
        tokens[name] = token
    if wrong:
        raise source.error(wrong)
    return tuple(
        Tenant(
            name=name, weight=entry.weight, quota=entry.quota, priority=entry.priority, token_sha256=tokens.get(name, "")
        )
        for name, entry in entries.items()
    )  # fmt: skip


def _wrong_quotas(entries: Mapping[str, TenantEntry], devices: Mapping[str, int]) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with quotas in a cluster with these devices."""
    total: Counter[str] = Counter()
    there = ", ".join(f"{kind}={count}" for kind, count in devices.items())
    for name, entry in entries.items() if devices else ():
        for kind, count in entry.quota.items():
            total[kind] += count
            if kind not in devices:
                yield (name, "quota", kind), f"quota.{kind} {count}: the cluster has {there}; name one of these types"
            elif total[kind] > devices[kind]:
                yield (
                    (name, "quota", kind),
                    f"quota.{kind} {count}: with it all quotas are {total[kind]} {kind}, and the cluster has {there}; lower one",
                )


def _token(name: str, entry: TenantEntry, folder: Path) -> tuple[str, str]:
    """Return the hash of a tenant's token, or what is wrong with it."""
    if name == OTHERS:
        said = entry.token_file or entry.token_sha256
        return "", f"{OTHERS} are those without a token of their own: leave it out" if said else ""
    if entry.token_sha256:
        if entry.token_file:
            return "", "token_file and token_sha256 say the same: leave one out"
        if not SHA256.fullmatch(entry.token_sha256):
            return "", NO_HASH
        return entry.token_sha256.lower(), ""
    if not entry.token_file:
        return "", f"{name} has no token: add token_file: FILE, or token_sha256: HEX"
    try:
        token = (folder / entry.token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        return "", f"token_file {entry.token_file}: {reason(error)}; give a file that holds the token"
    if not re.fullmatch(r"[!-~]{16,}", token):
        return (
            "",
            f"token_file {entry.token_file}: use a token of 16 characters or more, printable ASCII without spaces",
        )
    return token_hash(token), ""
