"""`pliant reproduce all`: the list, runs that are kept and resumed, failures that stop nobody else, and the page about it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import forked
import pytest
from command import command
from patience import until
from pliant_repro.figures import report
from pliant_repro.figures.catalog import FIGURES
from pliant_repro.figures.figure import Options, TableRows
from pliant_repro.figures.formatting import clock
from pliant_repro.figures.report import (
    DOES_NOT_HOLD,
    FAILED,
    HOLDS,
    NEVER,
    SKIPPED,
    VERDICTS,
    Batch,
    Entry,
    FigureRun,
    Status,
    is_done,
    read_run,
    render_page,
    result_path,
    run_path,
    status_of,
    write_report,
    write_run,
)  # fmt: skip

from pliant.duration import span_text
from pliant.errors import ConfigError

QUICK = Options(quick=True, device="cpu")
FAST = ("easyscale-fig14", "easyscale-fig15")
MAIN = "from pliant.cli.main import main; main()"


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of the command."""

    out: Path
    answer: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def command_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The two fastest figures, each in a process of its own."""
    out = tmp_path_factory.mktemp("reproduced")
    words = ["reproduce", *FAST, "--quick", "--device", "cpu", "--out", str(out), "--json"]
    return Finished(out, forked.run([forked.PLIANT, *words], cwd=out, timeout=110))


@pytest.fixture(scope="module")
def finished(command_run: Finished) -> Path:
    """The folder of the results."""
    assert command_run.answer.returncode == 0, command_run.answer.stderr
    return command_run.out


def batch(out: Path, *names: str, **more: Any) -> Batch:
    options = more.pop("options", QUICK)
    return Batch(figures=[FIGURES[name] for name in names], options=options, out=out, plot=False, **more)


def copied(finished: Path, to: Path) -> Path:
    for path in finished.glob("*.json"):
        (to / path.name).write_bytes(path.read_bytes())
    return to


# What is known in advance


def test_every_figure_says_what_is_known_in_advance() -> None:
    assert len(FIGURES) == 23
    assert FIGURES["kungfu-fig9"].source == "KungFu, OSDI'20"
    assert all(figure.usual_s > 0 and figure.caveats and figure.paper for figure in FIGURES.values())
    assert sum(figure.usual_s for figure in FIGURES.values()) < 3600, "all of it fits in an hour"


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "0:05"), (319, "5:19"), (3723, "1:02:03")])
def test_times_are_written_as_on_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


# The list


def test_the_list_says_how_the_last_run_went(finished: Path, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    write_run(out, FAST[0], FigureRun.ended(FAST[0], Options(device="cpu"), HOLDS, took_s=3.0))
    (out / "kungfu-fig6.json").write_text('{"bench": "kungfu-fig6", "ok": tr')
    write_run(out, "kungfu-fig4", FigureRun.ended("kungfu-fig4", QUICK, FAILED, why="it broke"))
    answer = command("reproduce", "--list", "--out", str(out))
    lines = {line.split("\t")[0]: line.split("\t")[1:] for line in answer.stdout.splitlines()}
    assert list(lines) == list(FIGURES)
    assert lines[FAST[0]][:4] == ["EasyScale, SC'23", "3s", "holds, quick", str(out / f"{FAST[0]}.json")]
    assert lines["kungfu-fig4"][1:4] == [f"~{span_text(FIGURES['kungfu-fig4'].usual_s)}", "failed", "-"]
    assert lines["kungfu-fig7"][1:4] == [f"~{span_text(FIGURES['kungfu-fig7'].usual_s)}", "never", "-"]
    assert lines["kungfu-fig6"][2] == "failed"


@pytest.mark.parametrize("words", [("--list", "--json"), ("--json", "--list"), ("--list", "--json", "-")], ids=" ".join)
def test_the_list_as_json(words: tuple[str, ...], finished: Path) -> None:
    listed = json.loads(command("reproduce", *words, "--out", str(finished)).stdout)
    assert [one["name"] for one in listed["experiments"]] == list(FIGURES)
    by_name = {one["name"]: one for one in listed["experiments"]}
    assert by_name[FAST[0]]["status"] == "holds"
    assert by_name[FAST[0]]["took_s"] > 0
    assert by_name[FAST[0]]["usual_from"] == "kept"  # a quick run says nothing about the default size
    assert by_name["p3-fig7"]["needs_root"]
    assert by_name["p3-fig7"]["result"] is None


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("all", "--data", "x"), "--models and --data"),
        (("all", "--models", "vgg"), "--models and --data"),
        (("all", "--limit", "-1"), "--limit -1"),
        (("report", "/nowhere"), "/nowhere is no folder"),
        (("report", "a", "b"), "give one folder"),
    ],
)
def test_wrong_wishes_have_one_clear_line(words: tuple[str, ...], part: str) -> None:
    answer = command("reproduce", *words)
    assert isinstance(answer.exception, ConfigError)
    assert part in str(answer.exception)


# What is kept


def done(out: Path, name: str = FAST[0], options: Options = QUICK) -> bool:
    return is_done(status_of(out, FIGURES[name]), options)


def test_only_a_finished_run_of_the_same_options_and_version_counts(finished: Path, tmp_path: Path) -> None:
    out, name = copied(finished, tmp_path), FAST[0]
    assert done(out)
    assert not done(out, options=Options(device="cpu"))
    assert not done(out, options=Options(quick=True, steps=3, device="cpu"))
    run = read_run(out, name)
    assert run is not None
    write_run(out, name, dataclasses.replace(run, version="0.0.1"))
    assert not done(out)
    write_run(out, name, run)
    assert done(out)
    run_path(out, name).unlink()  # as a run does that is then interrupted
    assert not done(out)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"outcome": "holds"}', "\0"])
def test_a_damaged_word_about_a_run_counts_as_none(text: str, finished: Path, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    run_path(out, FAST[0]).write_text(text)
    assert read_run(out, FAST[0]) is None
    assert not done(out)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"bench": "easyscale-fig14"}', '{"bench": "kungfu-fig7", "ok": true}']
)
def test_a_damaged_result_is_a_failure_that_names_the_file(text: str, finished: Path, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    path = result_path(out, FAST[0])
    path.write_text(text)
    found = status_of(out, FIGURES[FAST[0]])
    assert found.outcome == FAILED
    assert str(path) in found.why
    assert not done(out)


# Batches of real processes


def test_what_is_finished_is_not_run_again_unless_asked_for(finished: Path) -> None:
    paths = [run_path(finished, name) for name in FAST]
    before = [path.stat().st_mtime_ns for path in paths]
    was_kept = []
    batch(finished, *FAST).run(ended=lambda found, kept: was_kept.append(kept))
    assert was_kept == [True, True]
    assert [path.stat().st_mtime_ns for path in paths] == before
    paths[1].unlink()
    batch(finished, *FAST).run(ended=lambda found, kept: was_kept.append(kept))
    assert was_kept[2:] == [True, False]
    batch(finished, FAST[0], again=True).run(ended=lambda found, kept: was_kept.append(kept))
    assert was_kept[4:] == [False]
    assert paths[0].stat().st_mtime_ns > before[0]


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    options = Options(quick=True, models=("vgg",), device="cpu")  # a model that one has, and the other does not ask for
    failed, well = batch(tmp_path, "easyscale-fig12", FAST[1], options=options).run()
    assert failed.outcome == FAILED
    assert "--models vgg: this figure has shufflenetv2" in failed.why
    assert well.outcome == HOLDS
    page = write_report(tmp_path, [FIGURES["easyscale-fig12"], FIGURES[FAST[1]]]).read_text()
    assert "--models vgg: this figure has shufflenetv2" in page


def test_what_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    [found] = batch(tmp_path, "easyscale-fig12", limit_s=1.0).run()
    assert found.outcome == FAILED
    assert "--limit" in found.why
    assert not running(tmp_path)


def test_without_namespaces_figures_that_need_them_are_skipped_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "check_lab", lambda: ["not root: network namespaces need it; run with sudo"])
    [found] = batch(tmp_path, "p3-fig12").run()
    assert (found.outcome, found.result) == (SKIPPED, None)
    page = write_report(tmp_path, [FIGURES["p3-fig12"]]).read_text()
    assert "not root" in page


def running(out: Path) -> list[str]:
    """Processes that were started for this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(out) in words or "pliant-turns-" in words:
            found.append(words)
    return found


@pytest.mark.processes
def test_an_interrupted_batch_leaves_no_process_and_no_word(tmp_path: Path) -> None:
    words = ["reproduce", "easyscale-fig12", FAST[0], "--quick", "--no-plot", "--out", str(tmp_path)]
    log = tmp_path / "logs" / "easyscale-fig12.log"
    with subprocess.Popen([sys.executable, "-c", MAIN, *words], stderr=subprocess.PIPE, text=True) as process:
        until(lambda: log.exists() and "baseline" in log.read_text())
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command goes on" in said
    assert not running(tmp_path)
    assert status_of(tmp_path, FIGURES["easyscale-fig12"]).outcome == NEVER


def test_several_names_print_their_tables_and_write_a_report(command_run: Finished, finished: Path) -> None:
    assert [one["bench"] for one in json.loads(command_run.answer.stdout)["cells"]] == list(FAST)
    assert "GPUs in use, of 64" in command_run.answer.stderr  # stdout is the object alone
    page = parsed((finished / "report.html").read_text())
    assert set(FAST) <= set(page.ids)
    assert len(page.pictures) == 2


# The page


class Page(HTMLParser):
    """Parses a document, and checks that every element that is opened is closed."""

    EMPTY = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.pictures: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a handler"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "data", "action"):
                self.loads.append(value or "")
                if tag == "img":
                    self.pictures.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open, "all that was opened is closed"
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert all(each.startswith(("#", "data:image/")) for each in page.loads), "nothing is loaded from elsewhere"
    assert "url(" not in text
    assert "@import" not in text
    return page


NASTY = """<script>alert("1")</script> & 'two' <img src=http://example.org/x>"""


class Strange(type(FIGURES["p3-fig7"])):  # type: ignore[misc]
    """A figure whose texts are not to be trusted."""

    about, caveats = NASTY, (NASTY,)


def test_the_page_escapes_whatever_it_is_given() -> None:
    run = FigureRun(outcome=DOES_NOT_HOLD, took_s=61, command=NASTY)
    result = {"remarks": [NASTY], "args": {"models": NASTY, "scale": NASTY, "device": NASTY}}
    status = Status(Strange(), DOES_NOT_HOLD, NASTY, run, result)
    entry = Entry(status, (NASTY, NASTY, NASTY), TableRows(NASTY, (NASTY,), ((NASTY,),)))
    text = render_page([entry], NASTY, {"cpu": NASTY}, [NASTY])
    page = parsed(text)
    assert "<script" not in text
    assert page.text.count("alert") >= 15
    assert "1 do not hold. 1:01 in all." in page.text


@pytest.mark.parametrize("outcome", VERDICTS)
def test_the_page_says_every_outcome(outcome: str) -> None:
    entry = Entry(Status(FIGURES["p3-fig7"], outcome, "because"), picture="data:image/png;base64,AA==")
    text = render_page([entry], "pliant", {"memory_bytes": 1 << 33})
    page = parsed(text)
    assert f"{VERDICTS[outcome]}: because" in page.text
    assert "8.0 GiB" in page.text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_report_has_every_figure_with_and_without_a_result(finished: Path, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    result = json.loads(result_path(out, FAST[1]).read_text())
    result["cells"] = [{"policy": "unknown"}]
    result_path(out, FAST[1]).write_text(json.dumps(result))
    answer = command("reproduce", "report", str(out))
    assert answer.stdout == f"wrote {out / 'report.html'}\n"
    page = parsed((out / "report.html").read_text())
    assert page.ids == [*FIGURES, "machine"]
    assert [each[:26] for each in page.pictures] == ["data:image/svg+xml;base64,"]
    assert "easyscale-heter: mean completion time" in page.text
    assert "677 s" in page.text
    assert "has not the form of this figure" in page.text
    assert "pliant reproduce easyscale-fig14 --quick" in page.text
    assert f"{len(FIGURES) - 2} not run yet" in page.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: run it as another user")
def test_a_folder_that_cannot_be_written_is_named(finished: Path, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    out.chmod(0o500)
    with pytest.raises(ConfigError, match=r"report\.html"):
        write_report(out, [FIGURES[FAST[0]]])


RESULTS = Path(__file__).parents[2] / "repro" / "results"
KEPT = sorted([*RESULTS.glob("*_fig*.json"), *RESULTS.glob("reproduce_all/*.json")])


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_kept_results_can_be_shown(path: Path, tmp_path: Path) -> None:
    result = json.loads(path.read_text())
    figure = FIGURES[result["bench"]]
    assert all(figure.headline(result))
    assert figure.table(result).rows
    if path.parent.name == "reproduce_all":  # one of each figure
        figure.plot(result, tmp_path / "figure.svg")
