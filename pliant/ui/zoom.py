"""Which steps the curves of a job show: a slider with two handles, for the mouse, a finger, and the keys."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui
from nicegui.events import GenericEventArguments

NOTCHES = 200
LEAST_STEPS = 20
"""A job with fewer has nothing to choose from."""


class StepRange:
    """What was chosen stays as it is while the job goes on; an end that was not chosen goes with the newest step."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._last = 0
        self.chosen: tuple[int, int | None] = (0, None)
        with ui.element("div").classes("zoom") as self._row:
            self._told = ui.label("").classes("note")
            self._slider = ui.range(min=0, max=NOTCHES, value={"min": 0, "max": NOTCHES})
            self._slider.props('dense drag-range aria-label="Steps that the curves show"')
            self._slider.on("change", self._moved, [None])  # when a handle is let go: each redraw costs
            self._all = ui.button("All steps", on_click=lambda: self.choose(0, None)).props("flat dense no-caps")
        self._row.set_visibility(False)

    def follow(self, last_step: int) -> None:
        """The job has come so far."""
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
        # Handles move only with what was chosen: a slider that moves by itself is hard to hold.
        places = {
            "min": round(NOTCHES * begin / max(1, self._last)),
            "max": NOTCHES if end is None else round(NOTCHES * end / max(1, self._last)),
        }
        if self._slider.value != places:
            self._slider.value = places
