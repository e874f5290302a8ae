"""The file of tenants: what it says, and all of its mistakes at once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pliant.errors import ConfigError
from pliant.sched.tenants import Tenant
from pliant.sched.tenants_file import NO_HASH, read_tenants
from pliant.tokens import token_hash

CPU = {"cpu": 4}


def written(folder: Path, text: str) -> Path:
    (folder / "tenants.yml").write_text(text)
    return folder / "tenants.yml"


def test_a_file_says_who_has_what(tmp_path: Path) -> None:
    (tmp_path / "a.token").write_text("a-token-of-its-own\n")
    file = written(
        tmp_path,
        f"a: {{weight: 2, quota: {{cpu: 2}}, token_file: a.token}}\nb: {{priority: 1, token_sha256: {'AB' * 32}}}\nothers:\n",
    )
    assert read_tenants(file, CPU, with_tokens=True) == (
        Tenant(name="a", weight=2.0, quota={"cpu": 2}, token_sha256=token_hash("a-token-of-its-own")),
        Tenant(name="b", priority=1, token_sha256="ab" * 32),
        Tenant(name="others"),
    )
    (tmp_path / "a.token").unlink()  # a simulation needs no tokens
    assert [each.token_sha256 for each in read_tenants(file, {}, with_tokens=False)] == ["", "", ""]


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "b.token").write_text("the-same-for-two-tenants")
    (tmp_path / "short").write_text("short")
    file = written(
        tmp_path,
        """\
a:
  weight: 0
  quota: {cpu: 3, t4: 1}
  token_file: absent
b: {quota: {cpu: 2}, priority: high, token_file: b.token}
c: {wieght: 2, token_file: b.token}
-x: {token_file: short}
d: 3
e: {quota: {cpu: -1}}
f: {token_sha256: abc}
others: {token_file: b.token}
""",
    )
    with pytest.raises(ConfigError) as refused:
        read_tenants(file, CPU, with_tokens=True)
    lines = str(refused.value).splitlines()
    assert [line.removeprefix(f"{file}:") for line in lines] == [
        "2: weight 0: use more than 0",
        "3: quota.t4 1: the cluster has cpu=4; name one of these types",
        "4: token_file absent: No such file or directory; give a file that holds the token",
        "5: priority 'high': use a whole number",
        "5: quota.cpu 2: with it all quotas are 5 cpu, and the cluster has cpu=4; lower one",
        "6: the token of c is that of b, too: give each its own",
        "6: unknown key 'wieght': did you mean weight?",
        "7: tenant '-x': use up to 64 letters, digits, . _ and -, beginning with a letter or digit",
        "7: token_file short: use a token of 16 characters or more, printable ASCII without spaces",
        "8: tenant d 3: use a mapping, as in d: {weight: 2, quota: {cpu: 2}}",
        "9: e has no token: add token_file: FILE, or token_sha256: HEX",
        "9: quota.cpu -1: use 0 or more",
        f"10: {NO_HASH}",
        "11: others are those without a token of their own: leave it out",
    ]


@pytest.mark.parametrize("said", ["my-secret-token-1", "[my-secret-token-1]", "{my-secret-token-1: 2}"])
def test_a_token_that_was_written_as_its_hash_is_not_repeated(tmp_path: Path, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_tenants(written(tmp_path, f"a: {{token_sha256: {said}}}\n"), CPU, with_tokens=True)
    assert NO_HASH in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_command_in_the_message_prints_the_hash_of_the_token(tmp_path: Path, ending: str) -> None:
    (tmp_path / "FILE").write_text(f"a-token-of-its-own{ending}")
    [command] = re.findall("`(.*)`", NO_HASH)
    printed = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == token_hash("a-token-of-its-own")


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "1: the file is empty"), ("[a]", "1: this is no mapping"), ("a: {}\na: {}", "2: a is given twice")],
)
def test_what_is_no_file_of_tenants_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_tenants(written(tmp_path, text), CPU, with_tokens=False)
