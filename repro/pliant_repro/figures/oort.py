"""Oort's experiments with simulated federated jobs: time to accuracy, ablation, and rounds of 1,300 participants."""

from __future__ import annotations

import csv
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from pliant.child import die_with
from pliant.fed.config import DataConfig, FedConfig, LocalConfig, NamedOptions, Option
from pliant.fed.history import History
from pliant_repro.figures.figure import Figure, Headline, Options, Panel, Points, TableRows
from pliant_repro.figures.formatting import Result, show, show_span
from pliant_repro.figures.oort_jobs import (
    FedCourse,
    FedRun,
    device_table,
    flat_courses,
    median_of_all,
    run_jobs,
    spread,
)

CLIENTS = (
    "Fashion-MNIST on hundreds of simulated clients stands for the published data sets with up to 1.7 million clients on 68 "
    "GPUs: the published factors belong to those tasks, and are not expected here"
)


# --- time to accuracy ---

MAIN, ALIKE, SORTED, YOGI = "unequal", "alike", "large is slow", "yogi"
WORLDS = {
    MAIN: "Dirichlet(0.1) labels, phones of the table",
    ALIKE: "IID data, equal devices",
    "iid": "IID data, phones of the table",
    "equal devices": "Dirichlet(0.1) labels, equal devices",
    SORTED: "Dirichlet(0.1) labels, the more data the slower the phone",
    YOGI: "Dirichlet(0.1) labels, phones of the table, FedYogi instead of FedAvg",
}
TARGET = 0.8
OORT: dict[str, Option] = {"preset": "paper", "exploration_decay": 0.95}
"""The paper's setting, except how soon it stops exploring: 500 clients are explored sooner than 14,000."""
WAYS = {"random": NamedOptions(kind="random"), "oort": NamedOptions(kind="oort", options=OORT)}


def run_of(world: str, way: str, selector: NamedOptions, plain: FedConfig) -> FedRun:
    return FedRun(world, way, plain.model_copy(update={"selector": selector, "name": f"{world}-{way}"}))


def config_of(world: str, devices: str, seed: int, *, rounds: int, model: str = "mlp") -> FedConfig:
    return FedConfig(
        seed=seed,
        data=DataConfig(clients=500, partition="iid" if world in (ALIKE, "iid") else "dirichlet", alpha=0.1),
        model=model,
        local=LocalConfig(steps=10, batch_size=20, lr=0.05),
        participants=20,
        overcommit=1.3,
        rounds=rounds,
        target=0.0 if world == MAIN else TARGET,  # the main world is judged to its end
        aggregator=NamedOptions(kind="fed-yogi" if world == YOGI else "fed-avg"),
        devices="equal" if world in (ALIKE, "equal devices") else devices,
        # Where all rounds are equally long, the tests are what time is measured with.
        evaluate_every=1 if world == ALIKE else 5,
        batching=10,
    )


def large_is_slow(config: FedConfig, path: Path) -> Path:
    """Write the devices of the config's clients, dealt anew: the more samples a client has, the slower its device."""
    from pliant.fed.clients import SimulatedClients
    from pliant.fed.data.build import build_task

    sizes = build_task(config).sizes
    world = SimulatedClients.of(config, len(sizes), 0)
    rows = np.empty(len(sizes), np.int64)
    rows[np.argsort(sizes, kind="stable")] = np.argsort(world.round_s(config.local.steps), kind="stable")
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("compute_ms_per_sample", "bandwidth_kbps"))
        columns = (world.devices.compute_ms, world.devices.kbps)
        lines.writerows(zip(*(column[rows].tolist() for column in columns), strict=True))
    return path


def time_ratio(random: FedCourse, oort: FedCourse) -> float | None:
    """Return random's time over Oort's; a lower bound where random never got there; None where Oort did not."""
    own_s, other_s = oort.time_to(TARGET), random.time_to(TARGET)
    if own_s is None:
        return None
    return (other_s if other_s is not None else max(random.times_s[-1], own_s)) / own_s


class SelectionFigure(Figure):
    """A figure made of jobs that pick participants in several ways. --quick is too short for its claims."""

    caveats = (CLIENTS,)
    target: float | None = TARGET
    """The accuracy to be reached; None if it is another one in each setting."""

    def finish(
        self,
        found: Sequence[FedCourse],
        options: Options,
        ours: Result,
        complaints: Sequence[str],
        remarks: Sequence[str],
    ) -> Result:
        too_short = ["--quick is too short for the claims: it was judged only whether accuracies rise"] * options.quick
        return self.result(
            options,
            ours=ours,
            cells=[course.to_json() for course in found],
            complaints=flat_courses(found) if options.quick else complaints,
            remarks=[*remarks, *too_short],
            judged=not options.quick,
            target_accuracy=self.target,
        )


class TimeToAccuracy(SelectionFigure):
    """Participants picked by what they teach and how fast they are, beside participants picked at random.

    Both ways run with the same data, devices, initial model, rounds, over-commitment and tests, seed by seed. The claims, for
    Fashion-MNIST on 500 clients with unequal labels and the phones of the device table: 80 % is reached in a time at least 1.5
    times shorter in the median, never in a longer one, and the model ends as accurate. Where all data and devices are alike
    there is nothing to choose, and both must take the same time. The other worlds are shown and not judged.
    """

    name = "oort-time-to-accuracy"
    about = "participants by what they teach and how fast they are, beside random ones, simulated"
    usual_s = 260
    colours = {"random": "tab:orange", "oort": "tab:blue"}
    more, less_accurate, tie = 1.5, 0.005, (0.9, 1.1)
    """Least gain in time, tolerated loss of final accuracy, and the ratios that count as no difference."""
    paper = {
        "time_to_accuracy": "1.2x to 14.1x shorter than random, final accuracy 1.3 to 9.8 points higher",
        "replication": "1.1x to 2.2x, from the files that PyramidFL has published of Oort's program",
        "hardware": "68 P100; OpenImage, Speech Commands, Reddit, StackOverflow; 1,600 to 1.7 million clients, 100 in a round",
    }
    title = "Time to accuracy: Oort beside random"

    def run(self, options: Options) -> Result:
        rounds, model = options.choose_steps(quick=60, usual=300, full=600), "cnn" if options.full else "mlp"
        usual = tuple(world for world in WORLDS if world != YOGI)
        devices, remark = device_table(options)
        runs = []
        with tempfile.TemporaryDirectory(prefix="pliant-oort-") as folder:
            for world in options.choose(quick=(MAIN, ALIKE), usual=usual, full=tuple(WORLDS)):
                for seed in (0,) if options.quick else (0, 1, 2, 3, 4):
                    plain = config_of(world, devices, seed, rounds=rounds, model=model)
                    if world == SORTED:
                        path = large_is_slow(plain, Path(folder) / f"devices-{seed}.csv")
                        plain = plain.model_copy(update={"devices": str(path)})
                    runs += [run_of(world, way, selector, plain) for way, selector in WAYS.items()]
            options.say(f"{len(runs)} jobs of up to {rounds} rounds; {remark}")
            return self.result_of(run_jobs(runs, options), options, [remark, f"the model is {model}"])

    @staticmethod
    def pairs(found: Sequence[FedCourse], world: str) -> list[tuple[FedCourse, FedCourse]]:
        """Return (random, oort) of one world, seed by seed."""
        by = {(course.way, course.seed): course for course in found if course.world == world}
        seeds = sorted(seed for way, seed in by if way == "random" and ("oort", seed) in by)
        return [(by["random", seed], by["oort", seed]) for seed in seeds]

    def result_of(self, found: Sequence[FedCourse], options: Options, remarks: Sequence[str]) -> Result:
        worlds = {world: self.compare(found, world) for world in dict.fromkeys(course.world for course in found)}
        ours = {"median_s": worlds[MAIN]["oort"]["time_s"], "worlds": worlds}
        return self.finish(found, options, ours, self.judge(worlds), [*remarks, *self.remarks(worlds)])

    def compare(self, found: Sequence[FedCourse], world: str) -> Result:
        """Compare both ways in one world: the ratio of times of each seed, and what they ended with."""
        both = self.pairs(found, world)
        ratios = [time_ratio(random, oort) for random, oort in both]
        known = [ratio for ratio in ratios if ratio is not None]
        reached = [
            (oort.seed, random.time_to(TARGET) is not None, oort.time_to(TARGET) is not None) for random, oort in both
        ]
        sides: Result = {}
        for place, way in enumerate(WAYS):
            ones = [pair[place] for pair in both]
            sides[way] = {
                "time_s": median_of_all([one.time_to(TARGET) for one in ones]),
                "rounds": median_of_all([one.rounds_to(TARGET) for one in ones]),
                "final_accuracy": median(one.final for one in ones),
                "mean_round_s": median(one.mean_round_s for one in ones),
            }
        return {
            "about": WORLDS[world],
            "ratio": spread(known) if len(known) == len(ratios) else None,
            "ratios": ratios,
            "bounds_only": [seed for seed, by_random, by_oort in reached if by_oort and not by_random],
            "neither": [seed for seed, by_random, by_oort in reached if not by_oort and not by_random],
            "final_difference": spread([oort.final - random.final for random, oort in both]),
            **sides,
        }

    def judge(self, worlds: Mapping[str, Result]) -> list[str]:
        wrong = []
        main, alike = worlds[MAIN], worlds.get(ALIKE)
        if main["ratio"] is None:
            wrong.append("oort did not reach the accuracy with every seed")
        else:
            if main["ratio"]["median"] < self.more:
                wrong.append(f"the time is {main['ratio']['median']:.2f} times shorter in the median: not {self.more}")
            if main["ratio"]["least"] < 1:
                wrong.append(f"with one seed oort takes longer than random: {main['ratio']['least']:.2f}")
        if main["final_difference"]["median"] < -self.less_accurate:
            wrong.append(f"oort ends {-main['final_difference']['median']:.2%} less accurate than random")
        if alike is not None:
            least, most = self.tie
            between = alike["ratio"]["median"] if alike["ratio"] is not None else None
            if between is None or not least <= between <= most:
                wrong.append(f"with IID data on equal devices the ratio is {between}: not within {least} to {most}")
        return wrong

    def remarks(self, worlds: Mapping[str, Result]) -> list[str]:
        found = [
            "20 participants of 26 invited, 10 steps of 20 samples, SGD 0.05; times are to the first test that finds the "
            "accuracy; a final accuracy is the mean of the last tenth of the tests",
        ]
        for world, one in worlds.items():
            ratio = one["ratio"]
            if ratio is not None and ratio["least"] < 1 and world != ALIKE:
                found.append(f"{world}: with some seeds oort is no faster (least ratio {ratio['least']:.2f})")
            if one["neither"]:
                found.append(f"{world}: neither way reached the accuracy with seeds {one['neither']}")
            if one["bounds_only"]:
                seeds = one["bounds_only"]
                found.append(f"{world}: random never reached the accuracy with seeds {seeds}; ratios are lower bounds")
        return found

    def table(self, result: Result) -> TableRows:
        rows = []
        for world, one in result["ours"]["worlds"].items():
            random, oort, ratio = one["random"], one["oort"], one["ratio"]
            hours = [f"{side['time_s'] / 3600:.2f} h" if side["time_s"] else "never" for side in (random, oort)]
            shorter = f"{ratio['median']:.2f}x ({ratio['least']:.2f}-{ratio['most']:.2f})" if ratio else "-"
            rounds = f"{random['rounds'] or '-'} / {oort['rounds'] or '-'}"
            length = f"{random['mean_round_s']:.0f} / {oort['mean_round_s']:.0f} s"
            final = f"{random['final_accuracy']:.2%} / {oort['final_accuracy']:.2%}" if world == MAIN else "-"
            rows.append((world, *hours, shorter, rounds, length, final))
        columns = ("world", "random", "oort", "shorter", "rounds", "mean round", "final accuracy")
        title = f"hours on the virtual clock to {result['target_accuracy']:.0%}; medians of seeds (least-most)"
        return TableRows(title, columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        worlds = result["ours"]["worlds"]
        ratios: dict[str, Points] = {}
        for place, one in enumerate(worlds.values()):
            known = [each for each in one["ratios"] if each is not None]
            ratios[f"_{place}"] = ([place] * len(known), known, "o", "tab:blue")
        right = f"worlds: {', '.join(worlds)}"
        return [
            accuracy_panel([one for one in result["cells"] if one["world"] == MAIN], self.colours, by_time=True),
            Panel(x=right, y="random's time over Oort's", lines=ratios, levels=[1.0, self.more], limits=None),
        ]

    def headline(self, result: Result) -> Headline:
        ratio = result["ours"]["worlds"][MAIN]["ratio"]
        measured = (
            f"{ratio['median']:.2f}x ({ratio['least']:.2f} to {ratio['most']:.2f})" if ratio else "not reached by all"
        )
        published = f"1.2x to 14.1x (others, with its program: {self.paper['replication'].partition(',')[0]})"
        return "shorter time to accuracy", published, measured


def accuracy_panel(cells: Sequence[Result], colours: Mapping[str, str], *, by_time: bool) -> Panel:
    """Return accuracies over time or rounds, one line for each seed."""
    lines: dict[str, Points] = {}
    for one in cells:
        label = one["way"] if one["way"] not in lines else f"_{one['way']} {one['seed']}"
        places = [at_s / 3600 for at_s in one["times_s"]] if by_time else one["rounds"]
        lines[label] = (places, one["accuracies"], "-", colours[one["way"]])
    x = "hours on the virtual clock" if by_time else "rounds"
    return Panel(x=x, y="accuracy", lines=lines, levels=[TARGET], limits=None)


# --- ablation ---


class Ablation(SelectionFigure):
    """Oort without one of its parts: its penalty for slow clients, its pacer, its exploration.

    The setting is that of `oort-time-to-accuracy`. The claims: without the penalty (round_penalty 0) rounds take longer,
    towards random's; without the pacer (pacer_delta 0) the model ends no better, or needs no fewer rounds to the accuracy;
    without exploration fewer clients are ever heard. Final accuracies that differ by less than the seeds do are alike.
    """

    name = "oort-ablation"
    about = "Oort without its penalty, its pacer, its exploration, simulated"
    usual_s = 122
    ways = {
        way: NamedOptions(kind="oort", options={**OORT, **changed})
        for way, changed in {
            "oort": {}, "no penalty": {"round_penalty": 0.0}, "no pacer": {"pacer_delta": 0.0},
            "no exploration": {"exploration_factor": 0.0, "exploration_min": 0.0},
        }.items()
    }  # fmt: skip
    colours = {
        "random": "tab:orange", "oort": "tab:blue", "no penalty": "tab:red", "no pacer": "tab:green",
        "no exploration": "tab:purple",
    }  # fmt: skip
    alike = 0.002
    """Final accuracies that differ by less are alike, also where seeds differ by less."""
    paper = {
        "no penalty": "as many rounds to the accuracy, but longer ones",
        "no pacer": "fast at first, a lower final accuracy",
        "hardware": "OpenImage and StackOverflow on 68 P100; the breakdown was published as a figure",
    }
    title = "Oort without one of its parts"

    def run(self, options: Options) -> Result:
        rounds, model = options.choose_steps(quick=45, usual=150, full=600), "cnn" if options.full else "mlp"
        seeds = options.choose(quick=(0,), usual=(0, 1, 2), full=(0, 1, 2, 3, 4))
        devices, remark = device_table(options)
        runs = [
            run_of(MAIN, way, selector, config_of(MAIN, devices, seed, rounds=rounds, model=model))
            for seed in seeds
            for way, selector in ({"random": WAYS["random"]} | self.ways).items()
        ]
        options.say(f"{len(runs)} jobs of {rounds} rounds; {remark}")
        about = f"{model}, {len(seeds)} seeds, {rounds} rounds; medians over the seeds"
        return self.result_of(run_jobs(runs, options), options, [remark, about])

    def result_of(self, found: Sequence[FedCourse], options: Options, remarks: Sequence[str]) -> Result:
        ways = {way: self.numbers([one for one in found if one.way == way]) for way in self.colours}
        ours = {"median_s": ways["oort"]["time_s"], "ways": ways}
        tried = "without exploration a new client is picked only where those tried before are too few"
        return self.finish(found, options, ours, self.judge(ways), [*remarks, tried])

    def numbers(self, found: Sequence[FedCourse]) -> Result:
        finals = [one.final for one in found]
        return {
            "mean_round_s": median(one.mean_round_s for one in found),
            "final_accuracy": median(finals),
            "spread": max(finals) - min(finals),
            "coverage": median(one.coverage for one in found),
            "time_s": median_of_all([one.time_to(TARGET) for one in found]),
            "rounds": median_of_all([one.rounds_to(TARGET) for one in found]),
        }

    def judge(self, ours: Mapping[str, Result]) -> list[str]:
        wrong = []
        full_s, random_s, penalty_s = (ours[way]["mean_round_s"] for way in ("oort", "random", "no penalty"))
        if penalty_s <= full_s:
            wrong.append(f"without the penalty rounds take {penalty_s:.1f} s, with it {full_s:.1f} s: not longer")
        if penalty_s - full_s <= (random_s - full_s) / 2:
            nearer = f"nearer to oort's than to random's {random_s:.1f} s"
            wrong.append(f"without the penalty rounds take {penalty_s:.1f} s: {nearer}")
        heard, usually = ours["no exploration"]["coverage"], ours["oort"]["coverage"]
        if heard >= usually:
            wrong.append(f"without exploration {heard:g} clients are heard, with it {usually:g}: not fewer")
        pacer, full = ours["no pacer"], ours["oort"]
        if not self.no_better(pacer, full):
            wrong.append(
                f"without the pacer the model ends with {pacer['final_accuracy']:.2%} and needs {pacer['rounds']} rounds; "
                f"with it {full['final_accuracy']:.2%} and {full['rounds']}: better in both, beyond the spread of the seeds"
            )
        return wrong

    def no_better(self, one: Result, other: Result) -> bool:
        """Return whether it ends no more accurate, beyond the spread of the seeds, or needs no fewer rounds."""
        alike = max(self.alike, one["spread"], other["spread"])
        if one["final_accuracy"] <= other["final_accuracy"] + alike or one["rounds"] is None:
            return True
        return other["rounds"] is not None and bool(one["rounds"] >= other["rounds"])

    def table(self, result: Result) -> TableRows:
        rows = []
        for way, one in result["ours"]["ways"].items():
            hours = one["time_s"] and one["time_s"] / 3600
            reached = [
                ("not all" if each is None else show(each, form))
                for each, form in ((one["rounds"], "g"), (hours, ".2f"))
            ]
            rows.append(
                (way, f"{one['mean_round_s']:.1f} s", f"{one['coverage']:g}", *reached, f"{one['final_accuracy']:.2%}")
            )
        to = f"rounds to {result['target_accuracy']:.0%}"
        columns = ("selector", "mean round", "clients heard", to, "hours", "final accuracy")
        return TableRows("Oort without one of its parts; medians of seeds", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        return [accuracy_panel(result["cells"], self.colours, by_time=each) for each in (True, False)]

    def headline(self, result: Result) -> Headline:
        ways = result["ours"]["ways"]
        measured = (
            f"rounds of {ways['no penalty']['mean_round_s']:.1f} s ({ways['oort']['mean_round_s']:.1f} s with it)"
        )
        return "without the penalty", self.paper["no penalty"], measured


# --- rounds of 1,300 participants ---


@dataclass(frozen=True, slots=True)
class LargeRun:
    """A job, and what it cost this machine: seconds of its rounds and their tests, and the peak of its process."""

    history: History
    took_s: float
    peak_mb: float


def run_large(config: FedConfig) -> LargeRun:
    from pliant.fed.data.build import build_task
    from pliant.fed.rounds.loop import FederatedLoop
    from pliant.fed.rounds.storage import JobRecorder
    from pliant.fed.trainer import InProcess

    task = build_task(config)
    loop = FederatedLoop(config, task, InProcess(task, config.device), JobRecorder())
    loop.start()
    begun_s = time.perf_counter()
    history = loop.run()
    took_s = time.perf_counter() - begun_s
    return LargeRun(history, took_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


class LargeRounds(Figure):
    """Rounds of 1,300 participants, over-committed to 1,690, from several thousand synthetic clients.

    The paper ran as many on 68 GPUs. The claim here is that such rounds run, on whatever this machine is: every round has its
    1,300 updates, accuracy rises, and memory does not grow with the round's size, because updates are folded as they come.
    """

    name = "oort-1300"
    about = "rounds of 1,300 participants, over-committed"
    usual_s = 98
    participants, overcommit, batching = 1300, 1.3, 26
    most_mb = 2000
    """Limit of the simulating process: its data take 0.2 GB, and 1,300 updates kept would take 0.24 GB."""
    paper = {
        "participants": "up to 1,300 in a round, on 68 P100",
        "hardware": "68 GPUs, at most 20 clients on each at a time",
    }
    title = "Rounds of 1,300 participants"
    caveats = ("68 P100 trained as many participants; here it is shown that such rounds run, and in how much memory",)

    def config(self, options: Options, devices: str) -> FedConfig:
        return FedConfig(
            name=self.name,
            # 60,000 images for 6,000 clients: about 10 each, so that batches are small, too
            data=DataConfig(clients=6000, partition="dirichlet", alpha=1.0),
            model="mlp" if options.quick else "cnn",
            local=LocalConfig(steps=2 if options.quick else 10, batch_size=10, lr=0.1),
            participants=self.participants,
            overcommit=self.overcommit,
            rounds=options.choose_steps(2, 6, 100),
            selector=NamedOptions(kind="oort", options={"preset": "paper"}),
            devices=devices,
            evaluate_every=1,
            batching=self.batching,
            device="cuda" if options.where == "cuda" else "cpu",
        )

    def run(self, options: Options) -> Result:
        devices, remark = device_table(options)
        config = self.config(options, devices)
        options.say(f"{config.rounds} rounds of {config.participants} of {config.invited} invited clients; {remark}")
        # A process of its own: the memory that this process has needed for other figures is not the job's.
        with multiprocessing.get_context("spawn").Pool(1, die_with, (os.getpid(),)) as pool:
            return self.result_of(pool.apply(run_large, (config,)), config, options, [remark])

    def result_of(self, ran: LargeRun, config: FedConfig, options: Options, remarks: Sequence[str]) -> Result:
        cells = [
            {
                "round": each.round, "invited": len(each.invited), "aggregated": len(each.aggregated), "cut": len(each.cut),
                "duration_s": each.duration_s, "clock_s": each.clock_s, "loss": each.loss, "accuracy": point.accuracy,
            }
            for each, point in zip(ran.history.rounds, ran.history.points, strict=True)
        ]  # fmt: skip
        rate = sum(len(each.aggregated) for each in ran.history.rounds) / ran.took_s
        ours = {
            "median_s": ran.took_s / len(cells), "clients_per_s": rate, "peak_mb": ran.peak_mb,
            "accuracy": cells[-1]["accuracy"], "clock_s": cells[-1]["clock_s"], "took_s": ran.took_s,
        }  # fmt: skip
        said = [
            *remarks,
            f"{config.model}, {config.data.clients} clients of Fashion-MNIST, Dirichlet(1), {config.local.steps} steps of "
            f"{config.local.batch_size} samples, {config.batching} clients at once, in one process; tests are in the time",
            f"{rate:.1f} clients/s, at most {ran.peak_mb:.0f} MB",
        ]
        return self.result(options, ours=ours, cells=cells, complaints=self.judge(cells, ran), remarks=said)

    def judge(self, cells: Sequence[Result], ran: LargeRun) -> list[str]:
        expected = (int(self.participants * self.overcommit), self.participants)
        wrong = [
            f"round {cell['round']}: {cell['aggregated']} of {cell['invited']} clients count"
            for cell in cells
            if (cell["invited"], cell["aggregated"]) != expected
        ]
        first, last = cells[0]["accuracy"], cells[-1]["accuracy"]
        if last <= max(first, 0.15):
            wrong.append(f"accuracy {first:.1%} after the first round, {last:.1%} after the last: it does not rise")
        if ran.peak_mb > self.most_mb:
            wrong.append(f"{ran.peak_mb:.0f} MB of memory, more than {self.most_mb}")
        return wrong

    def table(self, result: Result) -> TableRows:
        rows = tuple(
            (*(str(cell[key]) for key in ("round", "invited", "aggregated", "cut")), f"{cell['duration_s']:.0f} s",
             f"{cell['loss']:.3f}", f"{cell['accuracy']:.2%}")
            for cell in result["cells"]
        )  # fmt: skip
        ours = result["ours"]
        title = f"{ours['clients_per_s']:.1f} clients/s, {ours['median_s']:.1f} s for a round, {ours['peak_mb']:.0f} MB"
        return TableRows(title, ("round", "invited", "counted", "cut", "virtual time", "loss", "accuracy"), rows)

    def panels(self, result: Result) -> list[Panel]:
        cells, rounds = result["cells"], [cell["round"] for cell in result["cells"]]
        accuracy: Points = (rounds, [cell["accuracy"] for cell in cells], "o-", "tab:blue")
        bars = {"duration": [cell["duration_s"] for cell in cells]}
        return [
            Panel(x="round", y="accuracy", lines={"_accuracy": accuracy}),
            Panel(x="round", y="s on the virtual clock", bars=bars, labels=[*map(str, rounds)]),
        ]

    def headline(self, result: Result) -> Headline:
        counted = show_span((cell["aggregated"] for cell in result["cells"]), ",d")
        return "participants in a round", self.paper["participants"], counted
