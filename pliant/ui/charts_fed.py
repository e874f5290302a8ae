"""Charts of a federated job: time to accuracy, rounds, and who was picked. Pure."""

from __future__ import annotations

from pliant.launch.duration import span_text
from pliant.ui.federation import Federation
from pliant.ui.frames import COLOURS, MOST_MEANS, MOST_POINTS, TEXT, Options, axis, frame, line, tooltip
from pliant.ui.series import Series

OUTCOME_COLOURS = {"aggregated": COLOURS[2], "cut": COLOURS[1], "lost": COLOURS[3]}


def accuracy(told: Federation) -> Options:
    """The test's accuracy over the virtual clock."""
    given = {"accuracy": told.accuracy, "top-5": told.top_5}
    shown = {name: series for name, series in given.items() if len(series)}
    unit, scale = ("hours", 1) if told.clock_s >= 7200 else ("minutes", 60)
    options = frame(len(shown) > 1, f"{unit} of the virtual clock", "%")
    options["series"] = [
        {**line(name, [(x * scale, y) for x, y in series.thinned(MOST_POINTS)], colour), "showSymbol": len(series) < 40}
        for (name, series), colour in zip(shown.items(), COLOURS, strict=False)
    ]
    if told.target is not None and options["series"]:
        options["series"][0]["markLine"] = {
            "symbol": "none",
            "silent": True,
            "label": {"formatter": "target", "position": "insideStartBottom", "color": TEXT},
            "data": [{"yAxis": told.target, "lineStyle": {"color": COLOURS[2], "type": "dashed"}}],
        }
    return options


def loss(told: Federation) -> Options:
    """The loss in training, of those who were aggregated, and in tests of the model."""
    shown = {name: series for name, series in losses(told).items() if len(series)}
    options = frame(True, "round", "")
    options["series"] = [
        line(name, series.mean(MOST_MEANS), colour)
        for (name, series), colour in zip(shown.items(), COLOURS, strict=False)
    ]
    return options


def losses(told: Federation) -> dict[str, Series]:
    return {"training": told.loss, "test": told.test_loss}


def rounds(told: Federation) -> Options:
    """How many clients were aggregated, cut and lost in each round, and how long it took."""
    options = frame(True, "round", "")
    options["yAxis"] = [{**options["yAxis"], "min": 0}, {**axis(""), "min": 0, "splitLine": {"show": False}}]
    options["series"] = [
        {
            **line(name, told.outcomes[name].mean(MOST_MEANS), colour),
            "stack": "clients",
            "areaStyle": {"opacity": 0.4},
        }
        for name, colour in OUTCOME_COLOURS.items()
        if name in told.outcomes
    ]
    options["series"].append({**line("duration in s", told.duration_s.mean(MOST_MEANS), COLOURS[4]), "yAxisIndex": 1})
    return options


def picked(told: Federation) -> Options:
    """Who was picked in the newest rounds, a dot for each."""
    options = frame(False, "round", "client")
    options["xAxis"] |= {"min": "dataMin", "max": "dataMax"}
    options["tooltip"] = {**tooltip("item"), ":formatter": "p => `round ${p.value[0]}, client ${p.value[1]}`"}
    options["legend"]["show"], options["grid"]["top"] = True, 34
    options["series"] = [
        {
            "type": "scatter",
            "name": outcome,
            "symbolSize": 5,
            "itemStyle": {"color": colour, "opacity": 0.8},
            "data": [[number, client] for number, clients in told.recent.items() for client in clients[outcome]],
            "animation": False,
        }
        for outcome, colour in OUTCOME_COLOURS.items()
    ]
    return options


def fairness(told: Federation) -> Options:
    """How many clients were picked how often."""
    counts: dict[int, int] = {}
    for often in told.picks.values():
        counts[often] = counts.get(often, 0) + 1
    often_most = max(counts, default=0)
    bins = max(1, -(-often_most // 40))
    heights: dict[int, int] = {}
    for often, clients in counts.items():
        heights[(often - 1) // bins] = heights.get((often - 1) // bins, 0) + clients
    places = range(max(heights, default=-1) + 1)
    labels = [str(place + 1) if bins == 1 else f"{place * bins + 1}-{(place + 1) * bins}" for place in places]
    options = frame(False, "times picked", "clients")
    options["xAxis"] |= {"type": "category", "data": labels}
    options["series"] = [
        {
            "type": "bar",
            "name": "clients",
            "data": [heights.get(place, 0) for place in places],
            "itemStyle": {"color": COLOURS[0], "borderRadius": [3, 3, 0, 0]},
            "animation": False,
        }
    ]
    return options


def spoken(told: Federation) -> dict[str, str]:
    """The charts in words, for who cannot see them."""
    target = "" if told.target is None else f", target {told.target:g} %"
    newest = told.recent[max(told.recent)] if told.recent else {}
    counts = ", ".join(f"{len(clients)} {outcome}" for outcome, clients in newest.items())
    best = "none yet" if told.best is None else f"{told.best:.2f} % at best"
    last = {name: series.last for name, series in losses(told).items()}
    said = ", ".join(f"{name} {value:.4g}" for name, value in last.items() if value is not None)
    return {
        "accuracy": f"accuracy over the virtual clock: {best} after {span_text(told.clock_s)}{target}",
        "loss": f"loss by round: {said or 'none yet'}",
        "rounds": f"{told.rounds} rounds; the newest: {counts}",
        "picked": f"who was picked in the newest rounds; round {told.rounds}: {', '.join(map(str, newest.get('invited', ())))}",
        "fairness": f"{len(told.picks)} clients were picked, the most frequent {max(told.picks.values(), default=0)} times",
    }
