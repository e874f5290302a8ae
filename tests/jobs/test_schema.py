"""Job files: what they give, and how mistakes in them are told."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pliant.comm.order import EXACT_ORDERS
from pliant.errors import MAX_TOLD, ConfigError
from pliant.jobs.schema import JobFile, TrainJob, job_from_json, read_job
from pliant.train.determinism import LEVELS
from pliant.yaml_source import YamlSource

FULL = """\
name: digits
program: sub/../train.py
args: [--epochs, 3, --code, 010, --answer, no, "two words"]
replicas: 4
min: 0
max: 3
devices: [v100, t4]
speed: {v100: 3.1, t4: 1}
mixed: true
determinism: D2
priority: -2
env: {OMP_NUM_THREADS: 1, FLAG: yes}
checkpoint_every: 5
"""


def read(folder: Path, text: str, *, file: str = "job.yml", name: str = "") -> JobFile:
    (folder / "train.py").touch()
    (folder / file).write_text(text)
    return read_job(YamlSource.read(folder / file), name)


def refused(folder: Path, text: str) -> list[str]:
    """The lines of the refusal, without the folder."""
    with pytest.raises(ConfigError) as refusal:
        read(folder, text)
    return str(refusal.value).replace(f"{folder}/", "").splitlines()


def test_every_key_arrives_and_goes_over_the_api_unchanged(tmp_path: Path) -> None:
    spec, is_named = read(tmp_path, FULL)
    assert is_named
    assert spec == TrainJob(
        name="digits",
        program=str(tmp_path / "train.py"),
        directory=str(tmp_path),
        args=("--epochs", "3", "--code", "010", "--answer", "no", "two words"),
        replicas=4,
        min=0,
        max=3,
        devices=("v100", "t4"),
        speed={"v100": 3.1, "t4": 1.0},
        mixed=True,
        determinism="D2",
        priority=-2,
        env={"OMP_NUM_THREADS": "1", "FLAG": "yes"},
        checkpoint_every=5,
    )
    assert job_from_json(spec.model_dump(mode="json")) == spec
    assert set(spec.model_dump(mode="json")) == set(TrainJob.model_fields)


def test_program_and_replicas_are_enough(tmp_path: Path) -> None:
    spec, is_named = read(tmp_path, "program: train.py\nreplicas: 3\nname:\n", file="my job.v2.yml")
    assert (spec.name, is_named) == ("my-job.v2-1", False)
    assert (spec.min, spec.max, spec.devices, spec.determinism) == (1, 3, (), "")


def test_the_first_free_number_makes_a_name(tmp_path: Path) -> None:
    job = read(tmp_path, "program: train.py\nreplicas: 1")
    assert job.with_free_name([]).job.name == "job-1"
    assert job.with_free_name(["job-1", "job-3", "job"]).job.name == "job-2"
    assert job.with_free_name(["job-1", "job-2"]).with_free_name([]).job.name == "job-1"


def test_a_name_from_the_command_line_goes_first(tmp_path: Path) -> None:
    assert read(tmp_path, FULL, name="other") == JobFile(
        read(tmp_path, FULL).job.model_copy(update={"name": "other"}), True
    )


def test_every_mistake_is_told_with_its_line(tmp_path: Path) -> None:
    text = """\
replica: 4
args: --epochs 3
min: -1
max: 2.5
program: tain.py
speed:
  v100: 2

  t4: fast
determinism: d4
order: fast
env:
  A B: x
mixed: yes please
priority: high
name: no/such
directory: /
"""
    assert refused(tmp_path, text) == [
        "job.yml:1: replicas is missing: add replicas: 4",
        "job.yml:1: unknown key 'replica': did you mean replicas?",
        "job.yml:2: args '--epochs 3': use a list, as in [a, b]",
        "job.yml:3: min -1: use 0 or more",
        "job.yml:4: max 2.5: use a whole number",
        f"job.yml:5: program tain.py: no such file; it is looked for in {tmp_path}",
        "job.yml:9: speed.t4 'fast': use a number",
        "job.yml:10: determinism 'd4' is not known: use 'D0', 'D1' or 'D2'",
        "job.yml:11: order 'fast' is not known: use 'ddp' or 'tree'",
        "job.yml:12: env 'A B' cannot be a variable: use letters, digits and _, as in OMP_NUM_THREADS",
        "job.yml:14: mixed 'yes please': use true or false",
        "job.yml:15: priority 'high': use a whole number",
        "job.yml:16: name 'no/such': use up to 64 letters, digits, . _ and -, beginning with a letter or digit",
        "job.yml:17: unknown key 'directory': a job runs where its file is",
    ]


def test_other_programs_than_python_must_be_executable(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch()
    assert refused(tmp_path, "program: run.sh\nreplicas: 1") == [
        "job.yml:1: program run.sh: it is neither Python (.py) nor executable; chmod +x it"
    ]
    (tmp_path / "run.sh").chmod(0o755)
    assert read(tmp_path, "program: run.sh\nreplicas: 1").job.program == str(tmp_path / "run.sh")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("max: 5", "job.yml:3: max 5: with 4 replicas, 4 devices are the most it can use"),
        ("max: 2\nmin: 3", "job.yml:4: min 3 is more than max 2: lower the one or raise the other"),
        ("mixed: true", "job.yml:3: mixed: unlike devices change bits below D2; add determinism: D2"),
        ("speed: {t4: 1}\ndevices: [cpu]", "job.yml:3: speed of t4: not among its devices"),
        ("devices: [cpu, cpu]", "job.yml:3: devices 'cpu' is listed twice"),
        ("speed: {cpu: 0}", "job.yml:3: speed.cpu 0: use more than 0"),
        ("speed: {cpu: .inf}", "job.yml:3: speed.cpu inf: use a number"),
        ("speed: {cpu: true}", "job.yml:3: speed.cpu True: use a number"),
        ("env: {PLIANT_TOKEN: x}", "job.yml:3: env PLIANT_TOKEN is pliant's own"),
        ("env: [a]", "job.yml:3: env ['a']: use a mapping"),
        ("args:\n  - a\n  - {b: c}", "job.yml:5: args.1 {'b': 'c'}: use text"),
        ('args: ["a\\0"]', "job.yml:3: args 'a\\x00' holds a NUL"),
        ("verify: 0", "job.yml:3: verify '0': use a number of steps, 1 or more, or off"),
        ("zzz: 1", "job.yml:3: unknown key 'zzz': there are name, program, args"),
        ("name: " + "x" * 65, "job.yml:3: name 'xxx"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_where_it_stands(tmp_path: Path, more: str, told: str) -> None:
    (line,) = refused(tmp_path, f"program: train.py\nreplicas: 4\n{more}\n")
    assert line.startswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "job.yml:1: the file is empty: write lines such as `key: value`"),
        ("- a\n- b", "job.yml:1: this is no mapping"),
        ("just text", "job.yml:1: this is no mapping"),
        ("a: 1\nb: c: d\n", "job.yml:2: not YAML: mapping values are not allowed here"),
        ("a:\n\t- b", "job.yml:2: not YAML: found character '\\t' that cannot start any token while scanning for the next "
         "token; indent with spaces, YAML takes no tabs"),
        ("a: [1, 2", "job.yml:1: not YAML: expected ',' or ']'"),
        ("a: 1\nb: \x07", "job.yml:2: not YAML:"),
        ("a: 1\na: 2", "job.yml:2: a is given twice"),
        ("env: {a: 1,\n a: 2}", "job.yml:2: a is given twice"),
        ("a: 1\n---\nb: 2", "job.yml:2: not YAML: but found another document"),
        ("a: &x [*x]", "job.yml:1: a list or mapping is used twice"),
        ("a: &x {b: 1}\nc: *x", "job.yml:1: a list or mapping is used twice"),
        ("program: !!python/object:os.system x", "job.yml:1: 'python/object:os.system' is no plain value"),
        ("? [a]\n: b", "job.yml:1: a key is a list or a mapping: use text"),
        ("a: " + "[" * 500, "job.yml:1: nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_no_job_file_is_told_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    (line,) = refused(tmp_path, text)
    assert line.startswith(told)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nope.yml: No such file or directory"):
        YamlSource.read(tmp_path / "nope.yml")
    with pytest.raises(ConfigError, match="Is a directory"):
        YamlSource.read(tmp_path)
    (tmp_path / "picture.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"picture.yml:1: it is not text"):
        YamlSource.read(tmp_path / "picture.yml")
    (tmp_path / "long.yml").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than"):
        YamlSource.read(tmp_path / "long.yml")


def test_values_that_are_not_texts_are_read_as_yaml_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("a: {x: 010, y: [1.5, true, null, 2026-11-15], 3: z}\nb: 010\n")
    page = YamlSource.read(file)
    assert page.values({"b"}) == {"a": {"x": 8, "y": [1.5, True, None, "2026-11-15"], "3": "z"}, "b": "010"}
    assert list(page.keys) == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "a job is an object"),
        ({}, "name is missing: add name; program is missing: add program: train.py; directory is missing"),
        ({"name": "a", "program": "b.py", "directory": "/", "replicas": 1}, "program 'b.py' is not an absolute path"),
        ({"name": "a", "program": "/b", "directory": "/", "replicas": True}, "replicas True: use a whole number"),
        ({"name": "a", "program": "/b", "directory": "/", "replicas": 10**9}, "replicas 1000000000: use 65536 or less"),
    ],
)
def test_the_api_refuses_in_one_line(value: object, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        job_from_json(value)
    assert str(refusal.value).startswith(told)
    assert "\n" not in str(refusal.value)


def test_the_example_is_a_job() -> None:
    job = read_job(YamlSource.read(Path(__file__).parents[2] / "examples" / "job.yml"))
    assert (job.job.name, Path(job.job.program).name, job.job.args) == ("job-1", "train.py", ("--epochs", "20"))


def test_levels_are_those_of_training() -> None:
    assert get_args(TrainJob.model_fields["determinism"].annotation) == ("", *LEVELS)
    assert get_args(TrainJob.model_fields["order"].annotation) == ("", *EXACT_ORDERS)


def test_a_command_is_program_and_arguments(tmp_path: Path) -> None:
    for command in ("train.py --epochs 3", "[train.py, --epochs, 3]"):
        job = read(tmp_path, f"command: {command}\nreplicas: 2\nkind: train\n").job
        assert isinstance(job, TrainJob)
        assert (Path(job.program).name, job.args) == ("train.py", ("--epochs", "3"))
    assert refused(tmp_path, "command: train.py\nprogram: train.py\nreplicas: 1") == [
        "job.yml:1: command and program say the same: leave one out"
    ]
    assert refused(tmp_path, "command: {a: b}\nreplicas: 1")[0].startswith("job.yml:1: command {'a': 'b'}: write")
    assert refused(tmp_path, "kind: other\nprogram: train.py\nreplicas: 1") == [
        "job.yml:1: kind 'other' is not known: use train or federated"
    ]


def test_what_pliant_run_is_asked_for_becomes_its_flags(tmp_path: Path) -> None:
    text = (
        "program: train.py\nreplicas: 4\nworkers: 2\nhosts: a:2,b:2\ncheckpoint_dir: kept\nrecord: run.jsonl\n"
        "policy: [priority, 'noise:x=1']\nmonitor: variance=10\ndeterminism: D1\norder: tree\nallow: [put_, median]\nverify: off\nflags: [--tensorboard, runs]\n"
    )
    job = read(tmp_path, text).job
    assert isinstance(job, TrainJob)
    assert job.run_flags() == [
        "--determinism", "D1", "--order", "tree", "--verify", "off", "--checkpoint-dir", f"{tmp_path}/kept", "--checkpoint-every", "50",
        "--monitor", "variance=10",
        "--record", f"{tmp_path}/run.jsonl", "--allow", "put_", "--allow", "median", "--policy", "priority", "--policy", "noise:x=1", "--tensorboard", "runs",
    ]  # fmt: skip
    assert (job.workers, job.hosts) == (2, "a:2,b:2")
    assert read(tmp_path, "program: train.py\nreplicas: 4\n").job.run_flags() == []


def test_what_is_wrong_with_values_does_not_hide_what_does_not_fit_together(tmp_path: Path) -> None:
    text = "program: train.py\nreplicas: 2\npriority: high\nmax: 3\nworkers: 7\nspeed: {t4: 1}\ndevices: [cpu]\nmixed: true\nkind: other\n"
    assert [line.partition(" ")[0] for line in refused(tmp_path, text)] == [f"job.yml:{n}:" for n in (3, 4, 5, 6, 8, 9)]


def test_a_value_that_is_wrong_is_not_blamed_on_others(tmp_path: Path) -> None:
    """What stands in for it fits everything."""
    for wrong in ("replicas: x\nmin: 3\nmax: 5", "replicas: 4\nmixed: true\ndeterminism: D9", "min: 2\nmax: 3"):
        assert len(refused(tmp_path, f"program: train.py\n{wrong}\n")) == 1


def test_all_that_is_not_plain_is_told_at_once(tmp_path: Path) -> None:
    text = "a: &x [1]\nb: *x\nc: !!set {}\na: 2\n? [k]\n: 1\n"
    assert [line.partition(" ")[0] for line in refused(tmp_path, text)] == [f"job.yml:{n}:" for n in (1, 3, 4, 1)]


def test_of_very_many_mistakes_the_first_are_told(tmp_path: Path) -> None:
    lines = refused(tmp_path, "program: train.py\nreplicas: 1\n" + "".join(f"key{n}: x\n" for n in range(500)))
    assert len(lines) == MAX_TOLD + 1
    assert lines[-1] == "and 480 more mistakes"


def test_numbers_that_python_does_not_read_are_texts(tmp_path: Path) -> None:
    for number in ("9" * 5000, "0x_", "0b_"):
        (line,) = refused(tmp_path, f"program: train.py\nreplicas: {number}\n")
        assert line.startswith(f"job.yml:2: replicas '{number[:20]}")


def test_a_device_without_end_is_read_no_further_than_a_file_may_be_long() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero:1: the file is larger than"):
        YamlSource.read(Path("/dev/zero"))
