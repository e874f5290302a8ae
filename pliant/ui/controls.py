"""Controls of the page: buttons that act on a job, and the slider that chooses the steps of its curves.

A button asks for confirmation. Whoever sees the page has shown its token, and may act.
"""

from __future__ import annotations

from collections.abc import Callable

from nicegui import run, ui
from nicegui.events import GenericEventArguments

from pliant.errors import PliantError
from pliant.ui.jobs import JobControl, ShownJob
from pliant.ui.timeline import plural

MOST_WORKERS = 100_000


class JobActions:
    """Buttons that act on a job, once they are confirmed."""

    def buttons(self, job: ShownJob) -> tuple[ui.button, ui.button]:
        """Add the buttons Resize and Stop to the present element."""
        resize = ui.button("Resize", icon="open_in_full", on_click=lambda: self._ask_resize(job))
        stop = ui.button("Stop", icon="stop", on_click=lambda: self._ask_stop(job))
        resize.props("outline dense no-caps padding='4px 12px'").mark("resize")
        stop.props("outline dense no-caps color=negative padding='4px 12px'").mark("stop")
        return resize, stop

    def _ask_resize(self, job: ShownJob) -> None:
        now = job.num_workers
        with ui.dialog() as dialog, ui.card().style("width: 360px; max-width: 92vw"):
            ui.label(f"Resize {job.name}?").style("font-weight: 600; overflow-wrap: anywhere")
            ui.label(f"It runs on {plural(now, 'worker')} now. The result stays the same, to the bit.").classes("note")
            size = ui.number("Workers", value=now, min=1, max=MOST_WORKERS, precision=0, step=1).mark("size")
            size.style("width: 100%").props("autofocus")

            def act(control: JobControl) -> str:
                if not isinstance(size.value, int | float) or size.value < 1:
                    return "give a number of workers from 1"
                assert control.resize is not None, "the button is hidden otherwise"
                return control.resize(int(size.value))

            self._finish(dialog, job, "Resize", act)
        dialog.open()

    def _ask_stop(self, job: ShownJob) -> None:
        with ui.dialog() as dialog, ui.card().style("width: 360px; max-width: 92vw"):
            ui.label(f"Stop {job.name}?").style("font-weight: 600; overflow-wrap: anywhere")
            ui.label("It ends after the step that it is in. This cannot be taken back.").classes("note")
            self._finish(dialog, job, "Stop", lambda control: control.stop())
        dialog.open()

    def _finish(self, dialog: ui.dialog, job: ShownJob, verb: str, act: Callable[[JobControl], str]) -> None:
        """Add the buttons to a dialog, and room for a refusal."""
        said = ui.label("").classes("bad").style("overflow-wrap: anywhere").props("role=alert").mark("said")

        async def go() -> None:
            button.disable()
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

        with ui.row().style("width: 100%; justify-content: flex-end; gap: 8px"):
            ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
            button = ui.button(f"{verb} it", on_click=go).props("no-caps").mark("confirm")
            if verb == "Stop":
                button.props("color=negative")


NOTCHES = 200
LEAST_STEPS = 20
"""The slider is shown from this number of steps on."""


class StepRange:
    """A slider for the steps of the curves. Chosen ends stay as the job continues; the others follow the newest step."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._last = 0
        self.chosen: tuple[int, int | None] = (0, None)
        with ui.element("div").classes("zoom") as self._row:
            self._told = ui.label("").classes("note")
            self._slider = ui.range(min=0, max=NOTCHES, value={"min": 0, "max": NOTCHES})
            self._slider.props('dense drag-range aria-label="Steps that the curves show"')
            self._slider.on("change", self._moved, [None])  # when a handle is released, because redrawing is slow
            self._all = ui.button("All steps", on_click=lambda: self.choose(0, None)).props("flat dense no-caps")
        self._row.set_visibility(False)

    def follow(self, last_step: int) -> None:
        """Set the newest step of the job."""
        self._last = last_step
        self._row.set_visibility(last_step >= LEAST_STEPS)
        self._show()

    def choose(self, begin: int, end: int | None) -> None:
        self.chosen = (begin, end)
        self._show()
        self._changed()

    def _moved(self, event: GenericEventArguments) -> None:
        low, high = (int(event.args[name]) for name in ("min", "max"))
        end = None if high >= NOTCHES else max(1, self._last * high // NOTCHES)
        self.choose(self._last * min(low, NOTCHES - 1) // NOTCHES, end)

    def _show(self) -> None:
        begin, end = self.chosen
        whole = self.chosen == (0, None)
        self._told.set_text(f"all {self._last:,} steps" if whole else f"steps {begin:,} to {end or self._last:,}")
        self._all.set_visibility(not whole)
        # Handles do not follow the job: a slider that moves by itself is hard to hold.
        places = {
            "min": round(NOTCHES * begin / max(1, self._last)),
            "max": NOTCHES if end is None else round(NOTCHES * end / max(1, self._last)),
        }
        if self._slider.value != places:
            self._slider.value = places
