"""Buttons that act on a job: each asks first, and does it only for who knows the page's token."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable

from nicegui import run, ui

from pliant.errors import PliantError
from pliant.ui.jobs import Control, Job

log = logging.getLogger(__name__)

WRONG_S = 1.0
"""After a wrong token: guessing shall be slow."""
MOST_WORKERS = 100_000


class Acting:
    """Makes the buttons. The token is the one that `pliant dash` says at its start."""

    def __init__(self, token: str) -> None:
        self._token = token

    def knows(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def buttons(self, job: Job) -> tuple[ui.button, ui.button]:
        """Resize and stop, in the place where they are made."""
        remembered = _Remembered()
        resize = ui.button("Resize", icon="open_in_full", on_click=lambda: self._ask_resize(job, remembered))
        stop = ui.button("Stop", icon="stop", on_click=lambda: self._ask_stop(job, remembered))
        resize.props("outline dense no-caps padding='4px 12px'").mark("resize")
        stop.props("outline dense no-caps color=negative padding='4px 12px'").mark("stop")
        return resize, stop

    def _ask_resize(self, job: Job, remembered: _Remembered) -> None:
        now = job.num_workers
        with ui.dialog() as dialog, ui.card().style("width: 360px; max-width: 92vw"):
            ui.label(f"Resize {job.name}?").style("font-weight: 600; overflow-wrap: anywhere")
            ui.label(f"It runs on {now} worker{'s' * (now != 1)} now. The result stays the same, to the bit.").classes(
                "note"
            )
            size = ui.number("Workers", value=now, min=1, max=MOST_WORKERS, precision=0, step=1).mark("size")
            size.style("width: 100%").props("autofocus")

            def act(control: Control) -> str:
                if not isinstance(size.value, int | float) or size.value < 1:
                    return "give a number of workers from 1"
                return control.resize(int(size.value))

            self._finish(dialog, job, "Resize", act, remembered)
        dialog.open()

    def _ask_stop(self, job: Job, remembered: _Remembered) -> None:
        with ui.dialog() as dialog, ui.card().style("width: 360px; max-width: 92vw"):
            ui.label(f"Stop {job.name}?").style("font-weight: 600; overflow-wrap: anywhere")
            ui.label("It ends after the step that it is in. This cannot be taken back.").classes("note")
            self._finish(dialog, job, "Stop", lambda control: control.stop(), remembered)
        dialog.open()

    def _finish(
        self, dialog: ui.dialog, job: Job, verb: str, act: Callable[[Control], str], remembered: _Remembered
    ) -> None:
        """The token, and the two ways out."""
        token = ui.input("Token of this page", value=remembered.token, password=True).style("width: 100%").mark("token")
        said = ui.label("").classes("bad").style("overflow-wrap: anywhere").props("role=alert").mark("said")

        async def go() -> None:
            button.disable()
            if not self.knows(str(token.value or "")):
                log.warning("%s of %s refused: a wrong token", verb.lower(), job.name)
                await asyncio.sleep(WRONG_S)
                said.set_text("Wrong token: it is PLIANT_TOKEN, or was printed where the page was started.")
                button.enable()
                return
            remembered.token = str(token.value)
            control = job.control
            if control is None:
                said.set_text("The job has ended meanwhile.")
                return
            try:
                answer = await run.io_bound(act, control)
            except PliantError as error:
                said.set_text(str(error))
                button.enable()
                return
            ui.notify(f"{job.name}: {answer}")
            dialog.close()

        token.on("keydown.enter", go)
        with ui.row().style("width: 100%; justify-content: flex-end; gap: 8px"):
            ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
            button = ui.button(f"{verb} it", on_click=go).props("no-caps").mark("confirm")
            if verb == "Stop":
                button.props("color=negative")


class _Remembered:
    """The token, once it was right, for as long as this page is open."""

    token = ""
