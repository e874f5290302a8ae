"""`pliant bench priority`: what it reads and computes, as values; and two real contests at small size."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command import command
from gang import FULL
from pliant_repro.bench import priority_cells, priority_verdict
from pliant_repro.bench.priority import (
    PriorityOptions,
    parse_rates,
    parse_slices,
    step_times_s,
    stretch,
)
from pliant_repro.bench.priority_cells import make_cell, make_cells, make_result, remarks_on, utilisation
from pliant_repro.bench.ssh_hosts import Host, host_identities, hosts_of_ranks, read_hosts, ssh_argv
from pliant_repro.bench.training import Subject, TrainingLoop, durations, run_window, running_s, sent_bytes
from pliant_repro.contest import split_words
from pliant_repro.lab.hosts import Lab, missing_for_lab
from pliant_repro.scaling_model import Layer
from pliant_repro.worker import ControlLine, default_interface
from priority_records import entry, record, setting

from pliant.errors import ConfigError
from pliant.identity import worker_spec


def bench(*words: str) -> Any:
    return command("bench", "priority", *words)


# What is asked for


def test_rates_share_a_unit() -> None:
    assert parse_rates("100,200,400mbit") == (100_000_000, 200_000_000, 400_000_000)
    assert parse_rates("500mbit,1gbit,none") == (500_000_000, 10**9, None)
    assert parse_rates("400,100,400mbit") == (400_000_000, 100_000_000, 400_000_000)
    assert parse_rates("1,2gbit, none") == (10**9, 2 * 10**9, None)
    with pytest.raises(ConfigError, match="no unit"):
        parse_rates("100,200")


def test_slices_are_parameters() -> None:
    assert parse_slices("auto") == (None,)
    assert parse_slices("1k,50k,1m,700") == (1000, 50_000, 1_000_000, 700)
    assert split_words("ddp, priority,ddp") == ("ddp", "priority")


def test_paced_compute_grows_with_the_batch() -> None:
    half = PriorityOptions(batch=16).profile()
    assert half.compute_s == pytest.approx(PriorityOptions().profile().compute_s / 2)
    assert PriorityOptions(batch=16).samples == 16


def test_ddp_is_tried_with_buckets_that_cut_as_those_of_the_full_model() -> None:
    assert PriorityOptions(model="resnet50").bucket_sizes_mb() == [None, 2.5, 0.5, 0.1]
    assert PriorityOptions(model="resnet50", compute="real").bucket_sizes_mb() == [None, 25.0, 5.0, 1.0]


def test_nothing_of_this_loads_torch_before_it_runs() -> None:
    code = (
        "import pliant_repro.bench.priority, pliant_repro.bench.priority_verdict, sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


# Hosts


def hosts_in(folder: Path, text: str) -> tuple[Host, ...]:
    (folder / "hosts.json").write_text(text)
    return read_hosts(folder / "hosts.json")


def test_hosts_are_names_or_objects(tmp_path: Path) -> None:
    assert hosts_in(tmp_path, '["chifflet-2", "10.0.0.7"]') == (Host(host="chifflet-2"), Host(host="10.0.0.7"))
    hosts = hosts_in(tmp_path, '[{"host": "a", "iface": "eth1", "slots": 2}, "b"]')
    assert hosts == (Host(host="a", iface="eth1", slots=2), Host(host="b"))
    assert [host.host for host in hosts_of_ranks(hosts)] == ["a", "a", "b"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[3]", '["a", "a"]', '[{"iface": "e0"}]', '[{"host": "a", "slots": 0}]', '[{"host": "a", "x": 1}]',
     '["-oProxyCommand=x"]', '["a b"]', '[{"host": "a", "iface": 1}]', '[{"host": "a", "slots": true}]'],
)  # fmt: skip
def test_other_host_lists_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hosts.json.*use a list"):
        hosts_in(tmp_path, text)


def test_the_ssh_command_asks_nothing_and_tells_no_secret() -> None:
    argv = ssh_argv(Host(host="node1"), "/opt/my python", 3)
    assert argv[0] == "ssh"
    assert "BatchMode=yes" in argv
    assert argv[-2:] == ["node1", "exec '/opt/my python' -m pliant_repro.worker --rank 3"]


def test_each_job_has_ports_and_identities_of_its_own() -> None:
    hosts = (Host(host="a", slots=2), Host(host="b"))
    first, second = (host_identities(hosts, number) for number in (0, 1))
    specs = [worker_spec(environ) for environ in (*first, *second)]
    assert [str(spec.worker) for spec in specs[:3]] == ["a:29501", "a:29502", "b:29503"]
    assert [spec.view.rank_of(spec.worker) for spec in specs] == [0, 1, 2, 0, 1, 2]
    assert len({str(spec.worker) for spec in specs}) == 6
    assert len({spec.secret for spec in specs}) == 2


# A worker's parts


def test_what_an_interface_has_sent() -> None:
    text = "Inter-|   Receive\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 9 10\n  e0: 11 0 0 0 0 0 0 0 77 0\n"
    assert sent_bytes(text, "e0") == 77
    assert sent_bytes(text, "eth9") == 0


def test_the_default_route_names_the_interface() -> None:
    head = "Iface\tDestination\tGateway\n"
    assert default_interface(f"{head}e0\t000AA8C0\t0\neth0\t00000000\t0101A8C0\n") == "eth0"
    assert default_interface(head) == "lo"


def test_commands_arrive_in_order() -> None:
    line = ControlLine(io.BytesIO(b'{"do": "count"}\n{"do": "hash"}\n{"do": "stop"}\n'), io.BytesIO())
    assert [command["do"] for command in line] == ["count", "hash"]


def test_a_window_leads_in_and_flushes() -> None:
    model = torch.nn.Linear(1, 1)
    subject = Subject(model, lambda model, batch: model(batch).mean(), None)
    flushed: list[int] = []
    model.register_state_dict_pre_hook(lambda *_: flushed.append(loop.num_steps))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = itertools.repeat([torch.ones(1)])
    loop = TrainingLoop(subject, model, optimizer, steps, stats=lambda: {"steps": loop.num_steps})
    found: Any = run_window(loop, iterations=4, lead=3)
    assert flushed == [7]
    assert len(found["marks_s"]) == 5
    assert len(found["losses"]) == 7
    assert (found["before"], found["after"]) == ({"steps": 0}, {"steps": 7})
    assert found["wall_s"] == [pytest.approx((found["marks_s"][-1] - found["marks_s"][0]) / 4)]


# From samples to cells


def test_a_step_ends_when_its_last_rank_does() -> None:
    marks = [{"marks_s": [0.0, 1.0, 2.0]}, {"marks_s": [0.0, 1.2, 2.1]}]
    assert step_times_s(marks, one_clock=True) == pytest.approx([1.2, 0.9])
    assert step_times_s(marks, one_clock=False) == pytest.approx([1.2, 1.0])


def test_a_cell_has_what_scripts_rely_on() -> None:
    # 80 Mbit/s carry 10 MB/s: T = 1.5 * 4 MB / 10 MB/s = 0.6 s, C = 0.6 s, P* = 0.15 + 0.6 = 0.75 s by its first layer.
    one = make_cell(setting(), entry("priority"), record(0.8, 1.0, 0.8), {"ddp": record(1.0, 1.0, 1.2)})
    for key in (
        "model", "rate_mbit", "mode", "r", "iter_median_s", "p_star_s", "fraction_of_bound", "p_fifo_s",
        "tx_bytes_per_iter", "cpu_s_per_iter", "hash",
    ):  # fmt: skip
        assert one[key] is not None, key
    assert one["r"] == pytest.approx(1.0)
    assert one["p_star_s"] == pytest.approx(0.9)  # both layers, and the second's own computing
    assert one["iter_median_s"] == 0.8
    assert one["fraction_of_bound"] == pytest.approx(0.9 / 0.8)
    assert one["fraction_of_worst_repeat"] == pytest.approx(0.9)
    assert one["gain_over_ddp"] == pytest.approx(0.25)
    assert one["gain_over_ddp_worst"] == pytest.approx(0.0)
    assert one["tx_over_least"] == pytest.approx(0.0025)
    assert one["owner_imbalance"] == pytest.approx(0.0075, rel=0.01)
    assert one["samples_per_s"] == 40.0
    assert one["bound"]["fraction"] == one["fraction_of_bound"]  # type: ignore[index]
    json.dumps(one)


def test_real_training_is_held_against_the_curve_of_losses() -> None:
    real = dataclasses.replace(setting(), compute="real")  # P* 0.9 s
    losses = [3 - 0.1 * step for step in range(9)]
    curve: dict[str, Any] = {"losses": [9.0, *losses], "timed_losses": losses}
    ours, theirs = record(0.9, 0.9, 0.9, **curve), record(1.2, 1.2, 1.2, **curve)
    one = make_cell(real, entry("priority"), ours, {"ddp": theirs})
    assert one["losses"] == curve["losses"]
    assert one["target_loss"] == pytest.approx(sum(losses[-8:]) / 8)
    assert (one["s_to_target"], one["s_to_target_ddp"]) == pytest.approx((8.1, 10.8))
    assert one["gain_to_target_over_ddp"] == pytest.approx(1 / 3)
    assert one["gain_of_cap_over_ddp"] == pytest.approx(1 / 3 / one["gain_cap"])  # type: ignore[operator]
    assert one["loss_apart_from_ddp"] == 0.0
    [said] = [remark for remark in remarks_on([one]) if "losses of 10 steps the same bits" in remark]
    assert said.endswith("holds")
    theirs.losses = [9.01, *losses]
    one = make_cell(real, entry("priority"), ours, {"ddp": theirs})
    assert any("does not hold" in remark for remark in remarks_on([one]))
    assert "losses" not in make_cell(setting(), entry("priority"), ours, {"ddp": theirs}), "paced: no curve"


def test_a_rate_is_settled_when_no_later_step_is_slow() -> None:
    settled = priority_cells.settled_after
    assert settled([0.5, 0.4, 0.31, 0.3], 0.3) == 2
    assert settled([0.3, 0.3], 0.3) == 0
    assert settled([0.3, 0.4], 0.3) is None


def test_a_failed_mode_is_a_cell_without_numbers() -> None:
    one = make_cell(setting(), entry("priority"), record(failure="rank 2 ended early"), {})
    assert (one["iter_median_s"], one["fraction_of_bound"], one["ok"]) == (None, None, False)
    assert "resnet50 at 80 Mbit/s, priority: rank 2 ended early" in remarks_on([one])


def test_without_a_known_rate_there_is_no_bound() -> None:
    one = make_cell(setting(None), entry("priority"), record(0.8), {})
    assert (one["r"], one["p_star_s"], one["fraction_of_bound"], one["bound"]) == (None, None, None, None)


def test_ddp_has_two_cells_also_where_its_default_is_best() -> None:
    shown = [entry("priority"), entry("ddp", label="ddp-default")]
    records = {"priority": record(0.5), "ddp-default": record(1.0)}
    cells = make_cells(setting(), shown, records, {"default": 1.0})
    assert [one["mode"] for one in cells] == ["priority", "ddp-default", "ddp"]
    assert cells[0]["gain_over_ddp"] == cells[0]["gain_over_ddp_default"] == 1.0
    shown.append(entry("ddp", bucket_cap_mb=0.5))
    cells = make_cells(setting(), shown, {**records, "ddp": record(0.75)}, {"default": 1.0, "0.5": 0.75})
    assert [one["mode"] for one in cells] == ["priority", "ddp-default", "ddp"]
    assert cells[0]["gain_over_ddp"] == 0.5
    assert cells[2]["probe_s_by_bucket"] == {"default": 1.0, "0.5": 0.75}


def test_other_bits_are_noticed_but_not_those_of_other_maths() -> None:
    shown = [entry("priority"), entry("ddp", label="ddp-default"), entry("ddp", bucket_cap_mb=0.5)]
    records = {"priority": record(0.5), "ddp-default": record(0.7), "ddp": record(0.6, digest="cc")}
    cells = make_cells(setting(), shown, records, {})
    assert not any("differ between modes" in remark for remark in remarks_on(cells))
    records["priority"] = record(0.5, digest="bb")
    cells = make_cells(setting(), shown, records, {})
    assert any("differ between modes" in remark for remark in remarks_on(cells))
    result = make_result({}, cells, [])
    assert result["ok"] is False
    assert {"bench", "args", "ours", "peers", "bound", "cells", "machine", "ok", "remarks"} <= set(result)


def test_a_busy_machine_gives_no_verdict() -> None:
    one = make_cell(setting(), entry("priority"), record(2.0, busy=0.9), {})
    assert any("no verdict" in remark for remark in remarks_on([one]))
    checks = priority_verdict.judge({"cells": [one]})
    assert not any(check.ok is False for check in checks)
    assert any("no verdict" in check.found for check in checks)


def test_utilisation_is_of_the_capacity() -> None:
    series = [(0.00, 0), (0.01, 1000), (0.02, 1000), (0.03, 1010), (0.04, 2010)]
    found = utilisation(series, 800_000)  # 1000 bytes in 10 ms
    assert found["tx_mean_share"] == pytest.approx(2010 / 4000)
    assert found["tx_idle_share"] == pytest.approx(0.5)
    assert utilisation(series[:2], 800_000) == utilisation(series, None) == {}


def test_measured_layers_are_stretched_to_the_time_with_communication() -> None:
    layers = (Layer(0.1, 0.2, 400), Layer(0.1, 0.2, 800))
    records = {"plain": record(0.6, compute_s=[0.5]), "priority": record(0.9, compute_s=[0.75])}
    assert [layer.forward_s for layer in stretch(layers, records)] == pytest.approx([0.15, 0.15])
    assert stretch(layers, {"priority": record(0.9, compute_s=[0.75])}) == layers
    assert running_s("1500000000 500000000 7") == 2.0


def test_the_side_that_sends_nothing_is_not_held_against_anything() -> None:
    one = make_cell(setting(), entry("plain"), record(0.6, compute_s=[0.5]), {})
    assert (one["iter_median_s"], one["fraction_of_bound"], one["ok"]) == (0.6, None, True)
    assert remarks_on([{**one, "compute": "real"}]) == []


def test_forwards_last_until_the_next_and_backwards_from_the_one_before() -> None:
    found = durations({"a": 1.0, "b": 2.0}, {"b": 5.0, "a": 9.0})
    assert found["a"] == pytest.approx((1.0, 4.0))
    assert found["b"] == pytest.approx((1.0, 2.0))  # a third of the time around the loss is forward


# The real ones

MISSING = missing_for_lab()
in_a_lab = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING) or "a lab is possible")
SHORT = ("--model", "sockeye", "--batch", "4", "--repeat", "1", "--iters", "2", "--warmup", "2")


def cells_by_mode(path: Path) -> dict[str, Any]:
    return {one["mode"]: one for one in json.loads(path.read_text())["cells"]}


@pytest.mark.skipif(not FULL, reason="tens of seconds beside what smaller tests show: PLIANT_FULL=1")
@pytest.mark.root
@pytest.mark.processes
@in_a_lab
def test_a_contest_in_a_lab(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--rate", "1gbit", "--modes", "priority,ddp")
    answer = bench(*SHORT, *words, "--json", str(tmp_path / "r.json"))
    assert answer.exit_code == 0, answer.output
    found = cells_by_mode(tmp_path / "r.json")
    assert set(found) == {"priority", "ddp-default", "ddp"}
    assert found["priority"]["hash"] == found["ddp-default"]["hash"]
    for one in found.values():
        assert one["iter_median_s"] > 0.5 * one["p_star_s"]
        assert one["same_on_all_ranks"]
        assert 600 < one["measured_mbit"] < 1050
        assert abs(one["tx_over_least"]) < 0.1


FAKE_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=${{1##*.}}; shift
exec ip netns exec pliant-{lab}-h$((host - 1)) sh -c "$*"
"""


@pytest.mark.skipif(not FULL, reason="15 s, for less than the lab and tests/launch show: PLIANT_FULL=1")
@pytest.mark.root
@pytest.mark.processes
@in_a_lab
def test_hosts_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command and the real conversation; only `ssh` is another, which goes into a namespace."""
    with Lab(num_hosts=2, rate="1gbit").up() as lab:
        fake = tmp_path / "bin" / "ssh"
        fake.parent.mkdir()
        fake.write_text(FAKE_SSH.format(lab=lab.name))
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
        hosts: Sequence[object] = [{"host": "10.77.0.1", "iface": "e0"}, {"host": "10.77.0.2", "iface": "e0"}]
        (tmp_path / "hosts.json").write_text(json.dumps(hosts))
        words = ("--hosts", str(tmp_path / "hosts.json"), "--rate", "1gbit", "--modes", "fifo,ddp")
        answer = bench(*SHORT, *words, "--json", str(tmp_path / "r.json"))
    assert answer.exit_code == 0, answer.output
    found = cells_by_mode(tmp_path / "r.json")
    assert found["fifo"]["hash"] == found["ddp-default"]["hash"]
    assert found["fifo"]["nodes"] == 2
    assert abs(found["fifo"]["tx_over_least"]) < 0.1
    assert "not shaped" in answer.output


def test_an_ssh_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "hosts.json").write_text('["node1", "node2"]')
    answer = bench(*SHORT, "--hosts", str(tmp_path / "hosts.json"), "--modes", "fifo", "--rate", "none")
    assert answer.exit_code == 1
    assert "Permission denied" in answer.output


def test_hosts_and_a_number_of_nodes_must_agree(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text('["node1", "node2"]')
    answer = bench("--hosts", str(tmp_path / "hosts.json"), "--nodes", "4")
    assert isinstance(answer.exception, ConfigError)
