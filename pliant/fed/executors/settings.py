"""What an executor is told. Starts without torch: launchers need it, too."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from pliant.errors import ConfigError

MODULE = "pliant.fed.executors.executor"
PATIENCE_S = 60.0
MIN_TOKEN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """As JSON it is the letter that an executor reads from its standard input."""

    server: str
    token: str = field(repr=False)
    ca: str = ""
    """Certificates, in PEM."""
    device: str = ""
    patience_s: float = PATIENCE_S
    name: str = ""
    seat: int = 0
    """Its number among the executors of its host."""
    directory: str = ""
    """Where to run, if there is such a folder there; else, and if it is empty, where it is started."""
    environ: dict[str, str] = field(default_factory=dict)

    def to_line(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Settings:
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--letter: the standard input holds no letter: {error!r:.80}") from None

    def place(self) -> tuple[str, int]:
        """The server's host and port."""
        host, _, port = self.server.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--server {self.server!r} is not HOST:PORT, such as 10.0.0.1:7400")
        return host.strip("[]"), int(port)


def check_token(token: str, what: str) -> str:
    """Raises ConfigError where it is too short to keep a stranger out."""
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{what} has {len(token)} characters: use {MIN_TOKEN} or more, such as `openssl rand -hex 32` prints"
        )
    return token
