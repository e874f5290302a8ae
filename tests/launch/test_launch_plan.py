"""From flags to a plan, without a process or a socket."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pliant.cluster import Host, PortRange
from pliant.errors import CapacityError, ConfigError
from pliant.identity import worker_spec
from pliant.launch.addresses import interfaces, nic_addresses, resolve
from pliant.launch.plan import LaunchPlan, Machine, RunOptions, find_command, first_view, make_plan
from pliant.machine import is_local

NICS = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.1", "fd00::1"), "dark0": ()}
NAMES = {"node1": "10.0.0.1", "node2": "10.0.0.2", "self": "127.0.1.1"}


def lookup(host: str) -> str:
    if host in NAMES:
        return NAMES[host]
    if host.startswith("node"):
        raise ConfigError(f"host name {host!r} does not resolve")
    return host


def plan(
    num_cpus: int = 2, environ: dict[str, str] | None = None, files: tuple[str, ...] = (), **options: object
) -> LaunchPlan:
    here = {address for found in NICS.values() for address in found}
    machine = Machine(
        num_cpus=num_cpus,
        nics=NICS,
        environ={"PATH": "/usr/bin:/bin", **(environ or {})},
        device_files=files,
        resolve=lookup,
        is_local=here.__contains__,
    )
    return make_plan(RunOptions(**{"program": ("true",), **options}), machine)  # type: ignore[arg-type]


def hosts(text: str) -> tuple[Host, ...]:
    return tuple(Host.parse(part) for part in text.split(","))


def test_without_hosts_this_machine_has_room_for_all() -> None:
    made = plan(np=4, num_cpus=2)
    assert made.hosts == (Host("127.0.0.1", 4),)
    assert made.num_local == 4
    assert plan(np=1, num_cpus=8).hosts == (Host("127.0.0.1", 8),)
    assert plan(np=1, num_cpus=8, watch=True, port_range=PortRange(9000, 9099)).hosts == (Host("127.0.0.1", 100),)


def test_np_beyond_the_ports_is_refused() -> None:
    with pytest.raises(CapacityError, match="-port-range 10000-10001 has 2 ports"):
        plan(np=3, port_range=PortRange(10000, 10001))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hosts": hosts("10.0.0.1:2,10.0.0.2:2"), "self_host": "10.0.0.2", "nic": "eth0"}, "10.0.0.2"),
        ({"hosts": hosts("10.0.0.2:2,10.0.0.1:2"), "nic": "eth0"}, "10.0.0.1"),
        ({"hosts": hosts("[fd00::1]:2,10.0.0.9:2"), "nic": "eth0"}, "fd00::1"),
        ({"hosts": hosts("10.0.0.1:2,127.0.0.1:2")}, "127.0.0.1"),
        ({"hosts": hosts("10.0.0.9:2,10.0.0.1:2")}, "10.0.0.1"),
        ({"hosts": hosts("node2:2,node1:2")}, "10.0.0.1"),
        ({"hosts": hosts("node2:2,node1:2"), "self_host": "node2"}, "10.0.0.2"),
        ({"self_host": "::1"}, "::1"),
        ({"nic": "eth0"}, "10.0.0.1"),
        ({}, "127.0.0.1"),
    ],
)
def test_self_is_what_the_flags_say_and_else_what_is_local(options: dict[str, object], expected: str) -> None:
    assert plan(**options).self_host == expected


def test_a_list_without_this_host_says_what_there_is_and_which_flags_help() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(hosts=hosts("10.9.9.9:4,10.9.9.8:4"))
    message = str(caught.value)
    assert "this machine is not in the host list 10.9.9.9,10.9.9.8" in message
    assert "10.0.0.1" in message
    assert "-self or -nic" in message


def test_a_self_or_nic_outside_the_list_is_named() -> None:
    with pytest.raises(ConfigError, match=r"-self 10.0.0.7 .* is not in the host list 10.0.0.1"):
        plan(hosts=hosts("10.0.0.1:1"), self_host="10.0.0.7")
    with pytest.raises(ConfigError, match=r"-nic lo .* is not in the host list 10.0.0.1"):
        plan(hosts=hosts("10.0.0.1:1"), nic="lo")


def test_several_local_hosts_need_a_word_which() -> None:
    with pytest.raises(ConfigError, match="10.0.0.1, fd00::1 are all this machine: say which with -self"):
        plan(hosts=hosts("10.0.0.1:1,[fd00::1]:1"))


def test_an_unknown_nic_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"-nic wlan9: this interface does not exist; .*lo \(127.0.0.1 ::1\), eth0"):
        plan(nic="wlan9")
    with pytest.raises(ConfigError, match="-nic dark0: this interface has no address"):
        plan(nic="dark0")


def test_names_are_resolved_once_and_trouble_is_named() -> None:
    assert [host.address for host in plan(hosts=hosts("node1:2,node2:2")).hosts] == ["10.0.0.1", "10.0.0.2"]
    with pytest.raises(ConfigError, match="'node9' does not resolve"):
        plan(hosts=hosts("node9:2"))
    with pytest.raises(ConfigError, match="resolves to 127.0.1.1 on this machine, which other hosts cannot reach"):
        plan(hosts=hosts("self:2,node2:2"))
    with pytest.raises(ConfigError, match="listed already"):
        plan(hosts=hosts("node1:2,10.0.0.1:2"))


def test_this_machine_has_a_loopback() -> None:
    found = interfaces()
    assert "127.0.0.1" in found["lo"]
    assert nic_addresses("lo", found)[0] == "127.0.0.1"
    assert is_local("127.0.0.2")
    assert not is_local("192.0.2.77")
    assert resolve("localhost") in ("127.0.0.1", "::1")
    assert resolve("10.1.2.3") == "10.1.2.3"


def test_a_name_that_does_not_exist_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="does not resolve .*give its address instead"):
        resolve("no-such-host.invalid")


def test_the_first_view_has_the_ports_of_every_host() -> None:
    made = plan(np=3, hosts=hosts("10.0.0.1:2,10.0.0.2:2"), port=4000)
    assert made.num_local == 2
    assert made.is_head
    view = first_view(made, {"10.0.0.1": [10000, 10003], "10.0.0.2": [10001]})
    assert [str(worker) for worker in view.workers] == ["10.0.0.1:10000", "10.0.0.1:10003", "10.0.0.2:10001"]
    assert [str(runner) for runner in view.runners] == ["10.0.0.1:4000", "10.0.0.2:4000"]
    with pytest.raises(CapacityError, match="bound 2 ports for 3 workers"):
        first_view(made, {"10.0.0.1": [10000, 10003], "10.0.0.2": []})


def test_init_version_is_the_number_of_the_first_view() -> None:
    assert first_view(plan(init_version=7), {"127.0.0.1": [10000]}).number == 7


def test_a_worker_reads_its_environment_back() -> None:
    made = plan(
        np=2,
        heartbeat_timeout_s=3.0,
        strategy="ring",
        determinism="D1",
        order="tree",
        allow=("put_", "median CUDA with indices output"),
        checkpoint_dir="/ck",
        checkpoint_every=50,
        resume="auto",
        resize_schedule=((10, 2), (20, 0)),
    )
    view = first_view(made, {"127.0.0.1": [10000, 10005]})
    spec = made.make_spec(view.workers[1], view, b"s" * 16, "http://x", 9)
    environ = made.worker_environ({"HOME": "/h", "PYTHONUNBUFFERED": "x"}, spec, slot=1, mark="m")
    assert worker_spec(environ) == spec
    assert spec.allow == ("put_", "median CUDA with indices output")
    assert (spec.strategy, spec.elastic, spec.determinism, spec.resume) == ("RING", True, "D1", "auto")
    assert (spec.order, made.agreement["--order"]) == ("tree", "tree")
    assert (spec.checkpoint_dir, spec.checkpoint_every, spec.resize_schedule) == ("/ck", 50, ((10, 2), (20, 0)))
    assert (environ["HOME"], environ["PYTHONUNBUFFERED"], environ["PLIANT_LOCAL_RANK"]) == ("/h", "x", "1")
    assert made.worker_environ({}, spec, slot=1, mark="m")["PYTHONUNBUFFERED"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environ
    assert not plan().make_spec(view.workers[0], view, b"s").elastic


def test_d2_pins_the_kernels_unless_the_user_has() -> None:
    pins = plan(determinism="D2").common_environ({"MKL_CBWR": "AVX2"}, "m")
    assert (pins["ATEN_CPU_CAPABILITY"], pins["ONEDNN_MAX_CPU_ISA"], pins["MKL_CBWR"]) == ("avx2", "AVX2", "AVX2")
    assert (pins["OMP_NUM_THREADS"], pins["MKL_NUM_THREADS"]) == ("1", "1")
    assert pins["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "MKL_CBWR" not in plan(determinism="D1").common_environ({}, "m")
    for level in ("", "D1"):
        assert plan(determinism=level).common_environ({}, "m")["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in plan(determinism="D0").common_environ({}, "m"), "D0 leaves torch as it is"
    old = make_plan(RunOptions(program=("true",), determinism="D2"), Machine(has_avx2=False, resolve=lookup))
    assert old.pins["ATEN_CPU_CAPABILITY"] == "default"


def test_a_python_file_gets_this_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert find_command([str(script), "-np", "3"]) == (sys.executable, str(script), "-np", "3")
    assert find_command(["sh", "-c", "x"], "/usr/bin:/bin") == ("sh", "-c", "x")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("nothing.py", "'nothing.py' does not exist in"),
        ("no-such-program", "'no-such-program' does not exist on PATH"),
        ("{}/tool", r"is not executable: `chmod \+x"),
        ("{}", "is a directory"),
    ],
)
def test_a_program_that_cannot_run_says_why(tmp_path: Path, program: str, message: str) -> None:
    (tmp_path / "tool").write_text("")
    with pytest.raises(ConfigError, match=message):
        find_command([program.format(tmp_path)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 0}, "-port 0 is not a port"),
        ({"builtin_config_port": -1}, "-builtin-config-port -1 is not a port"),
        ({"heartbeat_timeout_s": 0.0}, "--heartbeat-timeout 0"),
        ({"init_version": -1}, "add -w -config-server URL"),
        ({"config_server": "http://x", "builtin_config_port": 9100}, "give one of them, or the same port"),
        ({"debug_port": 70000}, "-debug-port 70000 is not a port"),
        ({"keep": True}, "alive after the job: add -w"),
    ],
)
def test_flags_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**options)


def test_far_more_workers_than_processors_are_taken_for_a_mistake_unless_slots_are_named() -> None:
    with pytest.raises(CapacityError, match="-np 1000: so many workers .* -H 127.0.0.1:1000"):
        plan(np=1000)
    assert plan(np=1000, hosts=hosts("127.0.0.1:1000")).num_local == 1000
    (here,) = plan(np=1, watch=True).hosts
    assert here.slots < 1000, "a job that is watched is not resized to so many either"
