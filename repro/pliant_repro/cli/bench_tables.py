"""Tables of the `pliant bench` commands: each function prints one kind of result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from rich.table import Table

from pliant.cli.output import wide_console
from pliant.machine import Json

Cell = Mapping[str, Any]


def milliseconds(seconds: object) -> str:
    """Format seconds as milliseconds with three digits, or all those before the point."""
    if not isinstance(seconds, float):
        return ""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def ratio(value: object, unit: str) -> str:
    return f"{value:.3g}{unit}" if isinstance(value, float) else "-"


def formatted(value: object, form: str, missing: str = "") -> str:
    return format(value, form) if isinstance(value, float) else missing


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> None:
    """Print a table whose columns are right-justified except the first and those in `left`; a bold row begins with `*`."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number and name not in left else "left", no_wrap=True)
    for row in rows:
        is_bold = row[0].startswith("*")
        table.add_row(row[0].removeprefix("*"), *row[1:], style="bold" if is_bold else None)
    wide_console().print(table)


def say(text: str, style: str | None = None) -> None:
    wide_console().print(text, style=style, highlight=False, markup=False)


def _cells(result: Json) -> list[Cell]:
    return cast("list[Cell]", result["cells"])


def show_allreduce(result: Json) -> None:
    def times(values: Cell) -> tuple[str, str, str]:
        if not isinstance(values.get("median_s"), float):
            return "failed", "", ""
        spread = f"{milliseconds(values['p10_s'])}-{milliseconds(values['p90_s'])}" if "p10_s" in values else ""
        return milliseconds(values["median_s"]), spread, milliseconds(values.get("cpu_s"))

    args, bound = cast(Cell, result["args"]), cast(Cell, result["bound"])
    where = (
        f"lab {args['lab']}" if args["lab"] else "one host, a GPU each" if args.get("device") == "cuda" else "one host"
    )
    title = (
        f"all-reduce {args['model']}: {result['num_tensors']} tensors, {cast(int, result['num_bytes']) / 1e6:.1f} MB, "
        f"{args['np']} workers, {where}"
    )
    ours = "ours, on NCCL" if args.get("device") == "cuda" else f"ours, {result['strategy']}"
    rows = [(ours, *times(cast(Cell, result["ours"])), "")]
    peers = {"ours, one fused tensor": result["fused"]} if "fused" in result else {}
    for name, peer in {**peers, **cast(Cell, result["peers"])}.items():
        rows.append((name, *times(cast(Cell, peer)), ratio(cast(Cell, peer)["speedup"], "x")))
    rows.append(("bound", *times(bound), ratio(bound["fraction"], " of it")))
    show_table(title, ("", "median ms", "p10-p90 ms", "CPU ms", "speedup"), rows)
    if not result["ok"]:
        say("not ok: ours failed or summed wrongly", "red")


def show_train(result: Json) -> None:
    rows = []
    for cell in _cells(result):
        for name, side in {"ours": cell["ours"], **cell["peers"]}.items():
            times = milliseconds(side["median_s"]), milliseconds(side["iqr_s"])
            is_ours = name == "ours"
            rows.append(
                (str(cell["np"]) if is_ours else "", name, *times, "" if is_ours else ratio(side["speedup"], "x"))
            )
    columns = ("workers", "side", "median ms", "IQR ms", "speedup")
    show_table(f"train {cast(Cell, result['args'])['model']}, one host", columns, rows)


def show_orders(result: Json) -> None:
    args, bound = cast(Cell, result["args"]), cast(Cell, result["bound"])
    rows = [
        (
            str(cell["order"]),
            *(f"{cell[key] / 1e6:.1f}" for key in ("planned_bytes", "wire_bytes", "peak_bytes")),
            f"{cell['sets_of_gradients']:.2f}",
        )
        for cell in _cells(result)
    ]
    bare = f"{_cells(result)[0]['bare_bytes'] / 1e6:.1f}"
    rows.append(("least traffic; bare accumulation", f"{bound['bytes'] / 1e6:.1f}", "", bare, "1.00"))
    columns = ("order", "planned MB", "sent MB", "peak MB", "sets of gradients")
    hosts = f"{args['replicas']} replicas on {args['np']} workers on {args['np']} hosts"
    show_table(f"a step of {args['model']}, {hosts}: between all hosts, and on each", columns, rows)


def show_gpu(result: Json) -> None:
    args, device, table = (cast(Cell, result[key]) for key in ("args", "device", "table"))
    title = f"{args['part']} on {device.get('name', args['device'])}, {cast(float, result['took_s']):.0f} s"
    left = ("side", "change", "result", "sizes", "digest after the last step")
    show_table(title, table["columns"], table["rows"], left)
    _show_verdicts(result)


def _show_pauses(title: str, rows: Iterable[tuple[str, object, object]]) -> None:
    """Print medians beside targets; a row is (name, numbers, target in seconds or None)."""
    shown = [
        (
            name,
            *(milliseconds(cast(Cell, values).get(key)) for key in ("median_s", "iqr_s", "max_s")),
            milliseconds(target),
        )
        for name, values, target in rows
    ]
    show_table(title, ("", "median ms", "IQR ms", "max ms", "to reach"), shown)


def show_resize(result: Json) -> None:
    args, targets = cast(Cell, result["args"]), cast(Cell, result["targets_s"])
    rows: list[tuple[str, object, object]] = []
    for name in ("shrink", "grow", "request_to_first_step"):
        values = cast(Cell, result[name])
        rows.append((name.replace("_", " "), values, targets[name]))
        details = [key for key in ("to_next_batch", "first_step", "until_it_began") if key in values]
        rows += [(f"  {key.replace('_', ' ')}", values[key], None) for key in details]
    many, few = args["np"], args["to"]
    _show_pauses(f"resize {args['model']}: {many} -> {few} -> {many} workers, {args['repeat']} times", rows)
    _show_felt(result)


def show_recover(result: Json) -> None:
    args = cast(Cell, result["args"])
    lost = f"{result['steps_lost']} steps lost"
    rows = [
        ("kill to next step", result["recover"], cast(Cell, result["targets_s"])["recover"]),
        ("  noticed to ready", result["noticed_to_ready"], None),
        ("  replacement's first step", result["replacement"], None),
        ("  an undisturbed step", result["step"], None),
    ]
    _show_pauses(f"recover {args['model']}: {args['repeat']} kills of {args['np']} workers, {lost}", rows)
    _show_felt(result)


def _show_felt(result: Json) -> None:
    """Print how the changes were felt: gaps between commits beside median steps, and which limits hold."""
    table = cast(Cell, result["felt_table"])
    show_table("what is felt: gaps between commits", table["columns"], table["rows"], ("change",))
    _show_verdicts(result)


def _show_verdicts(result: Json) -> None:
    for verdict in cast("list[Cell]", result["verdicts"]):
        say(
            f"{'not measured' if verdict['ok'] is None else 'holds' if verdict['ok'] else 'DOES NOT HOLD'}: {verdict['text']}"
        )


def show_priority(result: Json) -> None:
    args = cast(Cell, result["args"])
    rows, before = [], cast(object, ())
    for one in _cells(result):
        rate, first = one["rate_mbit"], one["rate_mbit"] != before
        before = rate
        spread = f"{milliseconds(one.get('iter_p10_s'))}-{milliseconds(one.get('iter_p90_s'))}"
        said = f"{rate:g} Mbit/s" if isinstance(rate, float) else "no limit"
        rows.append([
            ("*" if one["mode"] == "priority" else "") + (said if first else ""),
            formatted(one["r"], ".2f") if first else "",
            str(one["mode"]) if one["slice"] == "auto" else f"{one['mode']} {one['slice']}",
            milliseconds(one["iter_median_s"]) or "failed",
            spread if one["iter_median_s"] is not None else "",
            milliseconds(one["p_star_s"]) if first else "",
            formatted(one["fraction_of_bound"], ".3f"),
            formatted(one.get("fraction_of_worst_repeat"), ".3f"),
            *(formatted(one.get(key), "+.1%") for key in ("over_p_fifo", "gain_over_ddp", "tx_over_least")),
            milliseconds(one["cpu_s_per_iter"]),
        ])  # fmt: skip
    columns = ["rate", "r", "mode", "median ms", "p10-p90", "P* ms", "of P*", "worst"]
    columns += ["vs P_fifo", "vs ddp", "tx", "CPU ms"]
    title = f"{args['model']}, {args['nodes']} nodes, {args['compute']} compute: the step, and how near to the bound"
    show_table(title, columns, rows, left=("mode",))
    if not result["ok"]:
        say("not ok: a mode failed, or parameters differ", "red")


def show_preemption(result: Json) -> None:
    cells = _cells(result)
    first = cells[0]
    title = (
        f"{first['nodes']} nodes, B = {first['capacity_mbit']:.1f} Mbit/s, T = {milliseconds(first['all_s'])} ms: first layer's "
        "gradient ready -> its parameter ready"
    )
    rows = []
    for one in cells:
        sizes = f"{one['q_bytes'] >> 10}", f"{one['queued_bytes'] / 1024:.0f}"
        queues = milliseconds(one["queues_s"]) if one["mode"] == "priority" else ""
        latency = milliseconds(one["latency_s"]), milliseconds(one["latency_p90_s"])
        rows.append((str(one["way"]), *sizes, milliseconds(one["t0_s"]), queues, *latency))
    show_table(title, ("way", "q KiB", "queued KiB", "t_0 ms", "2q/B ms", "median ms", "p90 ms"), rows)
    for verdict in cast("list[Cell]", result["verdicts"]):
        say(f"{'holds' if verdict['ok'] else 'DOES NOT HOLD'}: {verdict['text']}")


def show_selection(result: Json) -> None:
    args = cast(Cell, result["args"])
    rows = []
    for cell in _cells(result):
        ours, loops = cell["ours"], cell["peers"].get("loops", {})
        times = [milliseconds(ours[key]) for key in ("median_s", "iqr_s", "cpu_s")]
        peer = milliseconds(loops.get("median_s")), ratio(loops.get("speedup"), "x")
        rows.append((f"{cell['explored']:.0%}", *times, f"{ours['peak_bytes'] / 1e6:.0f}", *peer))
    columns = ("have taken part", "ours ms", "IQR", "cpu ms", "peak MB", "loops ms", "speedup")
    show_table(f"{args['pick']} of {args['clients']:,} clients, Oort", columns, rows)
    say(f"{'holds' if result['ok'] else 'DOES NOT HOLD'}: at most 100 ms for a selection, and less than 500 MB")


def show_simulation(result: Json) -> None:
    args = cast(Cell, result["args"])
    sides = {"ours": result["ours"], **cast(Cell, result["peers"])}
    rows = []
    for name, side in sides.items():
        numbers = cast(Cell, side)
        turns = numbers.get("turns_clients_per_s") or [0.0]
        times = milliseconds(numbers.get("median_s")), milliseconds(numbers.get("iqr_s"))
        speedup = ratio(numbers.get("speedup"), "x") if name != "ours" else ""
        rates = f"{min(turns):.3g}", f"{max(turns):.3g}"
        rows.append((name, ratio(numbers["clients_per_s"], ""), *rates, *times, speedup))
    title = f"{args['pick']} of {args['clients']} clients a round"
    show_table(title, ("", "clients/s", "least turn", "most", "round ms", "IQR", "ours is"), rows)
    verdict = "holds" if result["ok"] else "DOES NOT HOLD"
    say(f"{verdict}: at least twice as many clients per second as Flower's simulation")
