"""Figures 9 to 13 of EasyScale: the bits of DDP on changing workers, and what replicas in one worker cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from pliant.errors import LaunchError
from pliant.identity import format_schedule
from pliant_repro.figures import launch
from pliant_repro.figures.figure import USUAL_MODELS, Figure, Headline, Options, Panel, Points, TableRows
from pliant_repro.figures.formatting import Result, names_in, num_cores, show, show_span, timed
from pliant_repro.figures.launch import RunLog, Task
from pliant_repro.profiles import WORKLOADS

Ratios = Mapping[str, tuple[float | None, float | None]]


def task_of(model: str, options: Options, **more: Any) -> Task:
    return Task(model=model, scale=options.size, device=options.where, **more)


# --- figure 9 ---


@dataclass(frozen=True, slots=True)
class Series:
    """One line of figure 9, and what is claimed of it."""

    name: str
    level: str
    unlike: bool = False
    """Whether the worker that joins in the last stage is a machine of another kind."""
    diverges: bool = False
    """Whether the bits are DDP's in the first stage only."""
    refuses: bool = False
    """Whether the job continues without the worker that joins."""


SERIES = (
    Series("D0", "D0", diverges=True),
    Series("D1", "D1"),
    Series("D1, unlike", "D1", unlike=True, refuses=True),
    Series("D1+D2, unlike", "D2", unlike=True),
)
COLOURS = {"D0": "tab:red", "D1": "tab:green", "D1, unlike": "tab:olive", "D1+D2, unlike": "tab:blue"}


class SameBits(Figure):
    """Training through three stages of workers has the loss of DDP, and more, its bits.

    As in the artifact, 4 replicas run on 4 workers, then on 2, then on 3, and the loss of the last replica minus that of the
    last DDP rank is drawn. The artifact restarts between stages and compares printed losses. Here the job is resized live,
    and SHA-256 of parameters, optimizer state and buffers are compared after every step.
    """

    name = "easyscale-fig9"
    about = "the same loss and the same bits as DDP, through changes of workers and machines"
    usual_s = 105
    replicas, stages = 4, (4, 2, 3)
    paper = {
        "stages": ["4 V100 x 1", "2 V100 x 2", "1 V100 x 2 + 2 P100 x 1"],
        "steps_per_stage": 100,
        "zero_stages": {"D0": [0], "D1": [0, 1], "D1+D2": [0, 1, 2]},
        "max_abs_delta_loss": {"D0": 0.16, "D1": 0.0, "D1+D2": 0.0},
    }
    title = "Loss of the last replica minus loss of the last DDP rank"
    caveats = (
        "live resizes instead of restarts; 10 steps in each stage instead of 100, in small models (--full has 100)",
        "a process with ATEN_CPU_CAPABILITY=default and ONEDNN_MAX_CPU_ISA=SSE41 stands for a machine of another kind",
    )

    def run(self, options: Options) -> Result:
        return self.measure(options, [each for each in SERIES if not (options.quick and each.refuses)])

    def measure(self, options: Options, chosen: Sequence[Series]) -> Result:
        """Run the figure with these series only."""
        steps = options.choose_steps(quick=3, usual=10, full=100)
        models = options.choose_models(quick=("shufflenetv2",), usual=("resnet50", "shufflenetv2"))
        cells = [self._cell(model, steps, options, chosen) for model in models]
        return self.result(
            options,
            ours={**cells[0]["ours"], "bits_compared": steps * len(self.stages) * len(chosen) * len(models)},
            cells=cells,
            complaints=[f"{cell['model']}: {text}" for cell in cells for text in self.judge(cell, steps)],
            remarks=[
                "under D1 the unlike machine is refused and the job continues with 2 workers, where the paper's diverges"
            ],
            steps_per_stage=steps,
            stages=list(self.stages),
        )

    def _cell(self, model: str, steps: int, options: Options, chosen: Sequence[Series]) -> Result:
        scale = options.scale or ("tiny" if options.quick else "small")
        task = Task(model=model, scale=scale, steps=steps * len(self.stages), replicas=self.replicas, digest=True)
        # Asked for in the last step of a stage, which waits for the new workers.
        resizes = tuple((number * steps - 1, size) for number, size in enumerate(self.stages) if number)

        def run_ddp(pinned: bool) -> RunLog:
            options.say(f"{model}: stock DDP{', pinned as under D2' * pinned}, {self.replicas} processes")
            return launch.train(replace(task, mode="ddp"), pinned=pinned)

        def run_pliant(each: Series) -> RunLog:
            options.say(f"{model}: pliant {each.name}, workers {' -> '.join(map(str, self.stages))}")
            flags = ["-w", "--determinism", each.level, "--resize-schedule", format_schedule(resizes)]
            return launch.train(replace(task, unlike=each.unlike, hold=resizes), np=self.stages[0], run=flags)

        pinnings = sorted({each.level == "D2" for each in chosen})
        calls = [*(partial(run_ddp, pinned) for pinned in pinnings), *(partial(run_pliant, each) for each in chosen)]
        found = launch.run_two_at_a_time(calls)
        ddp, ours = dict(zip(pinnings, found, strict=False)), found[len(pinnings) :]
        series = {
            each.name: self.compare(log, ddp[each.level == "D2"], task.steps)
            for each, log in zip(chosen, ours, strict=True)
        }
        times = [seconds for log in ours for seconds in log.step_times_s()]
        peers = {"ddp": {**timed(ddp[pinnings[0]].step_times_s()), "speedup": None}}
        return {"model": model, "series": series, "ours": timed(times), "peers": peers}

    def compare(self, found: RunLog, ddp: RunLog, num_steps: int) -> Result:
        """Compare a job with DDP, step by step. A missing step counts as different."""
        last, deltas, same = self.replicas - 1, [], []
        for step in range(num_steps):
            mine, theirs = found.steps.get(step), ddp.steps.get(step)
            digests = {*(mine.digests if mine else [""]), *(theirs.digests if theirs else [""])}
            same.append(len(digests) == 1 and "" not in digests)
            known = mine is not None and theirs is not None and last in mine.losses and last in theirs.losses
            deltas.append(mine.losses[last][-1] - theirs.losses[last][-1] if known and mine and theirs else None)
        return {
            "delta_loss": deltas,
            "same_bits": same,
            "workers": [found.steps[step].size if step in found.steps else 0 for step in range(num_steps)],
            "refused": "refused: " in found.output,
        }

    def judge(self, cell: Result, steps: int) -> list[str]:
        wrong = []
        for each in SERIES:
            series = cell["series"].get(each.name)
            if series is None:
                continue
            same, deltas, workers = series["same_bits"], series["delta_loss"], set(series["workers"])
            for stage in range(1 if each.diverges else len(self.stages)):
                part = slice(stage * steps, (stage + 1) * steps)
                if not all(same[part]) or any(delta != 0 for delta in deltas[part]):
                    first = same[part].index(False) if False in same[part] else 0
                    wrong.append(f"{each.name} differs from DDP in stage {stage}, at step {stage * steps + first}")
            if each.diverges and all(same):
                wrong.append(f"{each.name} never differs from DDP: the comparison would notice nothing")
            if each.refuses and not series["refused"]:
                wrong.append(f"{each.name}: the unlike machine was not refused")
            if not each.refuses and workers != set(self.stages):
                wrong.append(f"{each.name} went through {sorted(workers)} workers")
        return wrong

    def table(self, result: Result) -> TableRows:
        steps = result["steps_per_stage"]
        rows = []
        for cell in result["cells"]:
            for name, series in cell["series"].items():
                same = series["same_bits"]
                deltas = [abs(delta) for delta in series["delta_loss"] if delta is not None]
                stages = [f"{sum(same[begin : begin + steps])}/{steps}" for begin in range(0, len(same), steps)]
                refused = "yes" if series["refused"] else ""
                rows.append((cell["model"], name, *stages, f"{max(deltas, default=0):.2g}", refused))
        title = f"steps with DDP's bits, {self.replicas} replicas, {steps} steps per stage"
        return TableRows(title, ("model", "level", "4 x 1", "2 x 2", "2+1+1", "max |delta|", "refused"), tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        ends = [boundary * result["steps_per_stage"] - 0.5 for boundary in range(1, len(self.stages))]
        found = []
        for cell in result["cells"]:
            deltas = {name: series["delta_loss"] for name, series in cell["series"].items()}
            lines = {name: (range(len(each)), each, "-", COLOURS.get(name)) for name, each in deltas.items()}
            found.append(
                Panel(title=cell["model"], x="mini-batch", y="difference of loss", lines=lines, marks=ends, limits=None)
            )
        return found

    def headline(self, result: Result) -> Headline:
        found = [series for cell in result["cells"] for name, series in cell["series"].items() if name != "D0"]
        same = [step for series in found for step in series["same_bits"]]
        return "steps with DDP's bits under D1 and D1+D2", "all", f"{sum(same)} of {len(same)}"


# --- figure 10 ---


class Memory(Figure):
    """Replicas on one device need the memory of one worker; packed workers need that of all of them.

    Ours: N replicas in one process. Packed: N processes of stock DDP on the same device, which is a GPU or one core of the
    CPU. On a GPU the memory is what torch has reserved at the peak. On a CPU it is the processes' own memory, in which our
    copies of the replicas' gradients count, too: beside a GPU they lie in the host's memory.
    """

    name = "easyscale-fig10"
    about = "memory and throughput of 1 to 16 replicas on one device, beside packed workers"
    usual_s = 92
    flat_cuda, growth_cpu = 1.03, 0.5
    """Most growth of a GPU's memory, and the share of a packed worker's memory that a replica may add on a CPU."""
    paper = {
        "resnet50": {
            "batch": 32,
            "packed_mib": {"1": 4802.75, "2": 9601.75, "3": 14402.75, "4": 19201.75, "5": 24002.75, "6": 28801.75, "7": 32424.75},
            "replicas_mib": 4856.75,
            "out_of_memory_from": 8,
            "throughput": {"1": 0.868, "2": 0.930, "16": 0.941},
        },
        "shufflenetv2": {
            "batch": 512,
            "packed_mib": {"1": 21636.75},
            "replicas_mib": 21654.75,
            "out_of_memory_from": 2,
            "throughput": {"1": 0.988, "16": 0.995},
        },
    }  # fmt: skip
    title = "Memory and throughput of N replicas, relative to one packed worker"
    caveats = (
        "flat memory is a GPU's: on a CPU the replicas' gradients lie in the same memory and count, so ours grows, only more "
        "slowly than packed workers; on one H200 it was flat within 0.1 % (repro/results, training_h200)",
    )

    def run(self, options: Options) -> Result:
        models = options.choose_models(quick=("resnet50",), usual=("resnet50", "shufflenetv2"))
        counts = options.choose(quick=(1, 4), usual=(1, 4, 16), full=(1, 2, 4, 8, 16))
        steps = options.choose_steps(quick=4, usual=6, full=30)
        cells = [self._cell(model, count, steps, options) for model in models for count in counts]
        on_gpu = options.where != "cpu"
        by_model = {model: [cell for cell in cells if cell["model"] == model] for model in models}
        return self.result(
            options,
            ours=cells[0]["ours"],
            cells=cells,
            complaints=[text for model, mine in by_model.items() for text in self.judge(model, mine, on_gpu)],
            remarks=["throughput in the picture is relative to one packed worker, as in the paper"],
        )

    def _cell(self, model: str, count: int, steps: int, options: Options) -> Result:
        task = task_of(model, options, steps=steps, replicas=count, memory=True, one_core=options.where == "cpu")
        options.say(f"{model}: {count} packed DDP processes")
        try:
            packed = self._numbers(launch.train(replace(task, mode="ddp")), count)
        except LaunchError as error:
            packed = {"median_s": None, "iqr_s": None, "failure": str(error).splitlines()[-1]}
        options.say(f"{model}: {count} replicas in one process")
        ours = self._numbers(launch.train(task), count)
        known = packed["median_s"] is not None and ours["median_s"] is not None
        packed["speedup"] = packed["median_s"] / ours["median_s"] if known else None
        return {"model": model, "replicas": count, "ours": ours, "peers": {"packed": packed}}

    @staticmethod
    def _numbers(log: RunLog, replicas: int) -> Result:
        times = timed(log.step_times_s())
        step_s = times["median_s"]
        return {**times, "memory_bytes": log.peak_bytes(), "replicas_per_s": replicas / step_s if step_s else None}

    def judge(self, model: str, cells: Sequence[Result], on_gpu: bool) -> list[str]:
        ours, packed = ({cell["replicas"]: self._bytes(cell, side) for cell in cells} for side in ("ours", "packed"))
        most, least = max(ours), min(ours)
        if on_gpu:
            growth = ours[most] / ours[least]
            return [f"{model}: memory grows {growth:.2f}x to {most} replicas"] if growth > self.flat_cuda else []
        mine, theirs = ours[most] - ours[least], packed[most] - packed[least]
        if packed[most] == 0 or mine <= self.growth_cpu * theirs:  # 0: so many workers did not even start
            return []
        grown = [f"{each / (1 << 20):.0f} MiB" for each in (mine, theirs)]
        return [f"{model}: {most - least} more replicas take {grown[0]}, as many packed workers {grown[1]}"]

    @staticmethod
    def _side(cell: Result, side: str) -> Result:
        return dict(cell["ours"] if side == "ours" else cell["peers"][side])

    def _bytes(self, cell: Result, side: str) -> int:
        return int(self._side(cell, side).get("memory_bytes", 0))

    def _mib(self, cell: Result, side: str) -> str:
        found = self._bytes(cell, side)
        return f"{found / (1 << 20):.0f}" if found else "failed"

    def table(self, result: Result) -> TableRows:
        rows = []
        for cell in result["cells"]:
            speeds = [show(self._side(cell, side).get("replicas_per_s"), ".3g") for side in ("ours", "packed")]
            paper = self.paper.get(cell["model"], {})
            packed = paper.get("packed_mib", {}).get(str(cell["replicas"]), "too much")
            published = show(paper.get("replicas_mib"), ".0f"), show(packed, ".0f")
            memory = self._mib(cell, "ours"), self._mib(cell, "packed")
            rows.append((cell["model"], str(cell["replicas"]), *memory, *speeds, *published))
        columns = ("model", "N", "ours, MiB", "packed", "ours, 1/s", "packed", "paper, MiB", "packed")
        title = "memory and mini-batches per second of N replicas, beside N packed DDP processes"
        return TableRows(title, columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        found = []
        for model in names_in(result["cells"]):
            mine, paper = [cell for cell in result["cells"] if cell["model"] == model], self.paper.get(model)
            counts = [cell["replicas"] for cell in mine]
            base = self._bytes(mine[0], "packed") or 1
            sides = {"ours": "o-", "packed": "s-"}
            lines: dict[str, Points] = {
                side: (counts, [self._bytes(cell, side) / base or None for cell in mine], style, None)
                for side, style in sides.items()
            }
            rates = {side: [self._side(cell, side).get("replicas_per_s") for cell in mine] for side in sides}
            bars = {side: [rate and rate / (rates["packed"][0] or 1) for rate in rates[side]] for side in sides}
            if paper is not None:
                packed = {int(count): mib / paper["packed_mib"]["1"] for count, mib in paper["packed_mib"].items()}
                lines["paper, packed"] = (list(packed), list(packed.values()), "s:", "0.6")
                flat = paper["replicas_mib"] / paper["packed_mib"]["1"]
                lines["paper, EasyScale"] = ([1, 16], [flat, flat], "o:", "0.6")
                bars["paper, EasyScale"] = [paper["throughput"].get(str(count)) for count in counts]
            memory = Panel(title=f"{model}: memory", x="replicas", y="of one packed worker", lines=lines, scale="log2")
            found += [memory, Panel(title=f"{model}: throughput", x="replicas", bars=bars, labels=[*map(str, counts)])]
        return found

    def headline(self, result: Result) -> Headline:
        cells = [cell for cell in result["cells"] if cell["model"] == result["cells"][0]["model"]]
        paper = self.paper.get(cells[0]["model"], {})
        what = f"{cells[0]['model']}: memory of {cells[0]['replicas']} to {cells[-1]['replicas']} replicas"
        measured = " to ".join(f"{self._mib(cell, 'ours')} MiB" for cell in (cells[0], cells[-1]))
        return what, show(paper.get("replicas_mib"), ".0f", " MiB for any number"), measured


# --- figures 11 to 13: one ratio or two for each model ---


class RatioFigure(Figure):
    """A figure that measures some ratios of each model, beside the paper's."""

    table_title: str
    limits: tuple[float | None, float | None] = (0, None)
    quick_models: Sequence[str] = ("resnet50",)

    def run(self, options: Options) -> Result:
        models = options.choose_models(self.quick_models, WORKLOADS if options.full else USUAL_MODELS)
        return self.result_of([self.measure(model, options) for model in models], options)

    def result_of(self, cells: Sequence[Result], options: Options, *, judged: bool = True, **ours: Any) -> Result:
        ours, complaints = {**cells[0]["ours"], **ours}, self.judge(cells) if judged else []
        return self.result(options, ours=ours, cells=cells, complaints=complaints, remarks=[], judged=judged)

    @abstractmethod
    def measure(self, model: str, options: Options) -> Result:
        """Measure one model and return its cell."""

    @abstractmethod
    def judge(self, cells: Sequence[Result]) -> list[str]:
        """Return the complaints about the cells; none if the claim holds."""

    @abstractmethod
    def ratios(self, cell: Result) -> Ratios:
        """Return (ours, published) of each ratio of a model; None where there is none."""

    def table(self, result: Result) -> TableRows:
        rows = [
            (cell["model"], show(cell["ours"]["median_s"] and cell["ours"]["median_s"] * 1e3, ".3g"),
             *(show(value, ".3f") for pair in self.ratios(cell).values() for value in pair))
            for cell in result["cells"]
        ]  # fmt: skip
        names = [name for label in self.ratios(result["cells"][0]) for name in (label, f"paper: {label}")]
        return TableRows(self.table_title, ("model", "ours, ms", *names), tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        found = [self.ratios(cell) for cell in result["cells"]]
        bars = {}
        for label in found[0]:
            bars[label] = [each[label][0] for each in found]
            bars[f"paper: {label}"] = [each[label][1] for each in found]
        return [Panel(bars=bars, labels=names_in(result["cells"]), levels=[1], limits=self.limits)]


def plus_one(share: float | None) -> float | None:
    return None if share is None else 1 + share


class SwitchCost(RatioFigure):
    """The cost of switching between replicas.

    8 replicas in one worker. In every second step their contexts (random state, buffers) are not switched, so that both kinds
    of steps have the same noise; the result of such a run means nothing, but its time does. The difference is what the paper
    shows. The time inside the switch is measured as well and is judged, because it has no noise.
    """

    name = "easyscale-fig11"
    about = "what switching between replicas costs"
    usual_s = 60
    replicas, limit = 8, 0.02
    seconds = {
        "shufflenetv2": (0.33500, 0.33874), "resnet50": (0.50782, 0.50640), "vgg19": (0.77548, 0.77596),
        "neumf": (0.015092, 0.015078), "yolov3": (0.48262, 0.48015), "bert": (0.65107, 0.65097),
        "electra": (0.64566, 0.65840), "swin": (0.60291, 0.60399),
    }  # fmt: skip
    """Published seconds of a micro-step without and with the switch; 8 ESTs on one V100."""
    paper = {name: {"off_s": off, "on_s": on, "switch_share": on / off - 1} for name, (off, on) in seconds.items()}
    title = "Time of a micro-step with the switch, relative to without"
    table_title = f"a micro-step, {replicas} replicas in one worker"
    limits = (0.8, 1.2)
    caveats = (
        "the published workers had a GPU each; here they share the cores of one machine, so ratios compare, not absolute times",
        "the switch takes about 50 microseconds of Python for every replica: 1.6 % of the smallest model's micro-step, which is "
        "3 ms here; on a loaded machine it may be more than the 2 % that the claim allows",
    )

    quick_models = ("shufflenetv2", "bert")

    def run(self, options: Options) -> Result:
        if options.quick and not options.scale and options.where == "cpu":
            options = replace(options, scale="small")  # in a tiny model anything is a large part of a step
        return super().run(options)

    def measure(self, model: str, options: Options) -> Result:
        options.say(f"{model}: {self.replicas} replicas in one process, switch on and off in turn")
        steps = options.choose_steps(quick=8, usual=16, full=200)
        task = task_of(model, options, steps=steps, replicas=self.replicas, alternate=True, sync_turns=True)
        return self.cell(model, launch.train(task))

    def result_of(self, cells: Sequence[Result], options: Options, *, judged: bool = True, **ours: Any) -> Result:
        return super().result_of(cells, options, judged=judged, max_switch_share=max(map(self._share, cells)))

    def cell(self, model: str, log: RunLog) -> Result:
        """Return the times of a micro-step: a step's time over the number of replicas. The first 3 steps warm up."""
        ends = {turn.step: turn for turn in log.workers[0]}
        times: dict[bool, list[float]] = {True: [], False: []}
        for before, after in pairwise(ends.values()):
            if after.step >= 3:
                times[after.switched].append((after.at_s - before.at_s) / self.replicas)
        spent: dict[int, float] = {}
        for turn in log.workers[0]:
            if turn.switched and turn.step >= 3:
                spent[turn.step] = spent.get(turn.step, 0.0) + turn.switch_s / self.replicas
        on, off = (median(times[switched]) if times[switched] else None for switched in (True, False))
        share = median(spent.values()) / on if spent and on else None
        difference = on / off - 1 if on and off else None
        ours = {**timed(times[True]), "switch_share": share, "difference": difference}
        return {"model": model, "ours": ours, "peers": {"switch off": timed(times[False])}}

    @staticmethod
    def _share(cell: Result) -> float:
        share = cell["ours"]["switch_share"]
        return float("inf") if share is None else share

    def judge(self, cells: Sequence[Result]) -> list[str]:
        dear = [cell for cell in cells if self._share(cell) > self.limit]
        return [f"{cell['model']}: the switch takes {self._share(cell):.1%} of a micro-step" for cell in dear]

    def ratios(self, cell: Result) -> Ratios:
        published = plus_one(self.paper.get(cell["model"], {}).get("switch_share"))
        return {
            "with / without the switch": (plus_one(cell["ours"]["difference"]), published),
            "time inside the switch": (plus_one(cell["ours"]["switch_share"]), None),
        }

    def headline(self, result: Result) -> Headline:
        most = max(one["switch_share"] for one in self.paper.values())
        measured = show(result["ours"]["max_switch_share"], ".2%")
        return "most of a micro-step that a switch takes", f"{most:.2%}", measured


class DeterminismCost(RatioFigure):
    """The cost of determinism, with one replica in one process.

    PyTorch as it is, pliant under D1, and pliant under D2, as three processes that take turns of a few steps. As in the
    paper, the settings are timed: on CUDA deterministic kernels (D1) and fixed algorithms (D2), on a CPU pinned vector
    instructions (D2), all on one thread. The cost of D1 is the median of the rounds' ratios. The verdict on the mean over the
    models uses the spread between rounds: it counts as too high if it is so in every round. Models with short steps and many
    small tensors, where a step's bookkeeping shows, have a limit of their own.
    """

    name = "easyscale-fig12"
    about = "what determinism costs"
    usual_s = 100
    limit = 0.10
    """The paper's mean cost of D1 over all models, rounded up: +7.2 % on V100, +9.6 % on T4."""
    short = {"neumf": (100, 24), "shufflenetv2": (20, 20)}
    """Models with short steps: steps of a turn, and turns."""
    short_limit = 0.05
    """Most cost of D1 of a model with short steps."""
    seconds = {
        "shufflenetv2": (0.2163, 0.2167, 0.4697), "resnet50": (0.2503, 0.2688, 0.5860), "vgg19": (0.2586, 0.3924, 1.1327),
        "yolov3": (0.4731, 0.4590, 0.5491), "neumf": (0.0103, 0.0105, 0.0107), "bert": (0.4413, 0.4406, 0.4390),
        "electra": (0.4420, 0.4418, 0.4433), "swin": (0.4132, 0.4114, 0.4289),
    }  # fmt: skip
    """Published seconds of a mini-batch on V100: baseline, D1, D1+D2."""
    paper = {name: {"baseline_s": base, "d1_s": d1, "d2_s": d2} for name, (base, d1, d2) in seconds.items()}
    title = "Time of a mini-batch, relative to the baseline"
    table_title = "a mini-batch under each level, relative to PyTorch as it is"
    caveats = (
        "the published cost of D1+D2 is that of slower GPU kernels (up to 4.4x for VGG19); a CPU has none of them to avoid, so "
        "hardly any cost is to be seen here",
    )

    def measure(self, model: str, options: Options) -> Result:
        block, rounds = self.short.get(model, (6, 4))
        if options.quick or options.steps:
            block, rounds = max(2, options.choose_steps(quick=8, usual=14, full=200) // 2), 1
        elif options.full:
            rounds *= 8
        options.say(f"{model}: baseline, D1 and D1+D2 in turn, {rounds} rounds of {block} steps")
        task = task_of(model, options, steps=block * (rounds + 1), replicas=1, determinism="D1")
        sides = {
            "baseline": (replace(task, mode="plain"), False),
            "D1": (task, False),
            "D1+D2": (replace(task, determinism="D2"), True),
        }
        return self.cell(model, launch.take_turns(sides, block))

    def result_of(self, cells: Sequence[Result], options: Options, *, judged: bool = True, **ours: Any) -> Result:
        costs = self.mean_costs(cells)
        found = {"mean_cost_d1": fmean(costs) if costs else None, "mean_cost_d1_by_round": costs}
        return super().result_of(cells, options, judged=judged and not options.quick, **found)  # tiny steps say nothing

    def cell(self, model: str, times: Mapping[str, Sequence[Sequence[float]]]) -> Result:
        """Return the times of one model: for each side a list of step times per round."""
        numbers = {name: timed([each for one in rounds for each in one]) for name, rounds in times.items()}
        base, d1, d2 = (numbers[name]["median_s"] for name in ("baseline", "D1", "D1+D2"))
        pairs = zip(times["baseline"], times["D1"], strict=True)
        by_round = [median(ours) / median(theirs) - 1 for theirs, ours in pairs if ours and theirs]
        return {
            "model": model,
            "ours": {**numbers["D1"], "cost": median(by_round) if by_round else None, "cost_by_round": by_round},
            "d2": {**numbers["D1+D2"], "cost": d2 / base - 1 if d2 and base else None},
            "peers": {"baseline": {**numbers["baseline"], "speedup": base / d1 if d1 and base else None}},
        }

    @staticmethod
    def mean_costs(cells: Sequence[Result]) -> list[float]:
        """Return the mean cost of D1 over the models, for each round."""
        return [fmean(costs) for costs in zip(*(cell["ours"]["cost_by_round"] for cell in cells), strict=False)]

    def judge(self, cells: Sequence[Result]) -> list[str]:
        costs = self.mean_costs(cells)
        if not costs:
            return ["nothing was measured"]
        found = [
            f"{cell['model']}: D1 costs {cell['ours']['cost']:.1%}, at most {self.short_limit:.0%}"
            for cell in cells
            if cell["model"] in self.short and cell["ours"]["cost"] > self.short_limit
        ]
        if min(costs) > self.limit:
            found.append(f"D1 costs {show_span(costs, '.1%')} in the mean over the models, in every round")
        return found

    def ratios(self, cell: Result) -> Ratios:
        base, d1, d2 = self.seconds.get(cell["model"], (None, None, None))
        return {
            "D1": (plus_one(cell["ours"]["cost"]), d1 / base if d1 and base else None),
            "D1+D2": (plus_one(cell["d2"]["cost"]), d2 / base if d2 and base else None),
        }

    def headline(self, result: Result) -> Headline:
        published = fmean(each["d1_s"] / each["baseline_s"] - 1 for each in self.paper.values())
        measured = show(result["ours"]["mean_cost_d1"], "+.1%")
        return "cost of D1, mean over the models", f"{published:+.1%}", measured


class CopyCost(RatioFigure):
    """The cost of copying a replica's gradients, and of summing them in the last replica's turn.

    8 replicas in one worker beside 8 workers of stock DDP. In the paper every DDP worker has a GPU of its own. Here all of
    them share the machine, so a step of DDP counts for what a worker would take with a device to itself: step time x
    devices / 8, where a CPU's devices are its cores.
    """

    name = "easyscale-fig13"
    about = "what copying and summing gradients costs, beside DDP"
    usual_s = 96
    replicas, limit_copy, limit_sync = 8, 1.0, 1.10
    """The paper's claims: a replica that only copies is faster than a DDP worker, the one that sums hardly slower."""
    relative = {
        "shufflenetv2": (0.744, 0.800), "resnet50": (0.581, 0.588), "vgg19": (0.682, 0.894), "neumf": (0.484, 0.866),
        "yolov3": (0.782, 0.924), "bert": (0.785, 1.019), "electra": (0.779, 1.054), "swin": (0.906, 0.966),
    }  # fmt: skip
    """Published times relative to DDP: of ESTs 0 to 6, and of EST 7."""
    paper = {name: {"copy": copy, "sync": sync} for name, (copy, sync) in relative.items()}
    title = "Time of a replica's turn, relative to a DDP worker's step"
    table_title = "a turn, relative to a step of a DDP worker with a device of its own"
    caveats = ("8 DDP workers had a V100 each; here they share the cores, and their step time is divided accordingly",)

    def measure(self, model: str, options: Options) -> Result:
        steps = options.choose_steps(quick=5, usual=10, full=100)
        task = task_of(model, options, steps=steps, replicas=self.replicas, sync_turns=True)
        options.say(f"{model}: {self.replicas} DDP processes, then {self.replicas} replicas in one process")
        ddp = launch.train(replace(task, mode="ddp"))
        return self.cell(model, launch.train(task), ddp, num_cores() if options.where == "cpu" else 1)

    def cell(self, model: str, mine: RunLog, ddp: RunLog, devices: int) -> Result:
        turns: list[list[float]] = [[] for _ in range(self.replicas)]
        for turn in mine.workers[0]:
            if turn.step >= 2 and turn.took_s is not None:
                turns[turn.replica].append(turn.took_s)
        copies, syncs = [each for one in turns[:-1] for each in one], turns[-1]
        steps = ddp.step_times_s()
        own_s = median(steps) * min(devices, self.replicas) / self.replicas if steps else None
        ours = {
            **timed(copies),
            "copy": median(copies) / own_s if copies and own_s else None,
            "sync": median(syncs) / own_s if syncs and own_s else None,
            "turn_s_by_replica": [median(each) if each else None for each in turns],
        }
        return {
            "model": model,
            "ours": ours,
            "peers": {"ddp": {**timed(steps), "own_device_s": own_s, "speedup": None}},
        }

    def judge(self, cells: Sequence[Result]) -> list[str]:
        wrong = []
        for cell in cells:
            copy, sync = cell["ours"]["copy"], cell["ours"]["sync"]
            if copy is None or sync is None:
                wrong.append(f"{cell['model']}: nothing was measured")
                continue
            if copy >= self.limit_copy:
                wrong.append(f"{cell['model']}: a replica that only copies takes {copy:.2f}x of a DDP worker's step")
            if sync >= self.limit_sync:
                wrong.append(f"{cell['model']}: the replica that sums takes {sync:.2f}x of a DDP worker's step")
        return wrong

    def ratios(self, cell: Result) -> Ratios:
        copy, sync = self.relative.get(cell["model"], (None, None))
        ours = cell["ours"]
        return {"replicas 0-6: copy": (ours["copy"], copy), "replica 7: copy + sum": (ours["sync"], sync)}

    def headline(self, result: Result) -> Headline:
        published = show_span(each["sync"] for each in self.paper.values())
        measured = show_span(cell["ours"]["sync"] for cell in result["cells"])
        return "the replica that copies and sums, of a DDP worker's step", published, measured
