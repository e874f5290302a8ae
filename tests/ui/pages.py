"""Real commands in a home of their own, and pages of a real browser, for the tests beside this file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

MAIN = (sys.executable, "-c", "from pliant.cli.main import main; main()")
TOKEN = "the page's own token"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 60.0


def said(process: subprocess.Popen[str], pattern: str) -> str:
    """What a line of its output holds, once it comes."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"it ended without {pattern!r}")


@dataclass
class Home:
    """Commands that see no other jobs of this user."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PLIANT_", "XDG_"))}
        return kept | {"XDG_RUNTIME_DIR": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state")}

    def start(self, *words: str, is_forked: bool = True, **settings: Any) -> subprocess.Popen[str]:
        """Start a command. One that has a page of its own beside it for long must be none of those that the tests fork."""
        usual = {"env": self.environ, "stdout": subprocess.PIPE}
        main = MAIN if is_forked else ("env", *MAIN)
        process = subprocess.Popen([*main, *words], cwd=self.folder, text=True, **{**usual, **settings})
        self.started.append(process)
        return process

    def dash(self, *words: str, port: int = 0) -> str:
        """Start the page; its address with the token."""
        (self.folder / "token").write_text(TOKEN)
        process = self.start("dash", *words, "--port", str(port), "--token-file", str(self.folder / "token"))
        return said(process, r"the page is at (\S+)") + f"?token={quote(TOKEN)}"

    def end_last(self) -> None:
        """What was started last."""
        self.started[-1].send_signal(signal.SIGTERM)
        assert self.started[-1].wait(timeout=30) == 0

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.started:
            process.communicate(timeout=30)


@dataclass
class Browser:
    """Chromium; `foreign` are the requests that went anywhere but to the page, `errors` what its console complained about."""

    chromium: Any
    foreign: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def page(self, theme: str = "light", width: int = 1280, height: int = 900) -> Any:
        context = self.chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        page = context.new_page()
        page.set_default_timeout(DEADLINE_S * 1000)
        page.on("request", lambda request: self._note(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self._complained(message))
        return page

    def _complained(self, message: Any) -> None:
        # A page whose server has ended tries to reach it again, and says so.
        told = ("ERR_CONNECTION", "WebSocket is already in CLOSING or CLOSED state")
        if message.type == "error" and not any(words in message.text for words in told):
            self.errors.append(message.text)

    def _note(self, url: str) -> None:
        if not re.match(r"(http|ws)://127\.0\.0\.1:\d+/|data:|blob:", url):
            self.foreign.append(url)
