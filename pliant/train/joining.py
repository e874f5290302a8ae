"""`pliant.join()`: the way from a started process to its `Job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from pliant.adapt import Policy
from pliant.comm.order import EXACT_ORDERS, Order
from pliant.errors import ConfigError, NotLaunched
from pliant.identity import WorkerSpec, worker_spec
from pliant.process_title import program_name, show_as
from pliant.progress_board import ProgressBoard, note_failure
from pliant.train.adaptation import adaptation_settings
from pliant.train.declared import JobSettings
from pliant.train.determinism import Level, level_of
from pliant.train.events import StepCommitted
from pliant.train.guard import EVERY
from pliant.train.job import Job
from pliant.train.operators import check_allowed
from pliant.train.replicas import Blocks
from pliant.train.sync import check_sync_options
from pliant.train.wrapping import whole_number
from pliant.uncaught import report_uncaught


def join(
    replicas: int | None = None,
    *,
    determinism: str | None = None,
    order: str | None = None,
    sync: str = "fifo",
    slice_bytes: int | None = None,
    in_flight_bytes: int | None = None,
    gradients: str = "device",
    blocks: Blocks | None = None,
    seed: int | None = None,
    policies: Sequence[Policy] = (),
    monitor: Mapping[str, int] | None = None,
    record: str = "",
    replay: str = "",
    verify: int | None = None,
    allow: Sequence[str] = (),
) -> Job:
    """Join the job that this process was started for. Without a launcher, start a job with this worker alone.

    Args:
        replicas: N, the number of data-parallel ranks of the training; fixed for the life of the job. If None, there is
            one replica per worker, and N follows the number of workers (weak scaling), so the result depends on them.
        determinism: "D0" (equal bits as long as the workers stay the same), "D1" (equal bits on any workers of one
            kind; the default) or "D2" (also on machines of different kinds, at a price).
        order: how the gradients of the N replicas are added. It is part of the experiment: sums of three or more floats
            depend on it. "ddp" (the default on CPUs): as torch's DDP on gloo adds them. "tree" (the default on GPUs):
            along a balanced binary tree over the replicas, so that a worker adds the gradients of its own replicas at
            once, keeps few of them, and sends few to other hosts. Both give the same bits on any workers.
        sync: how sums travel; it never changes a bit. "fifo": in the order in which backward makes them, and the
            optimizer waits for all. "priority": what the next forward needs first goes first, and each parameter is
            updated when its sum arrives, while the forward already runs. "auto": priority if the network is slow enough
            for it to help. ("slicing" and "baseline" exist for comparison.)
        slice_bytes: the largest slice of a gradient with priority. If None, it is tuned while running.
        in_flight_bytes: how much may be in the network at once. If None, it is tuned while running.
        gradients: where a worker with several replicas keeps their gradients between turns. "device": on the GPU, which
            is fast; it needs memory for up to log2(N) + 1 sets of gradients with order="tree", and for N with "ddp".
            "host": in host memory, so that a GPU needs no more memory for many replicas than for one.
        blocks: a function from the number of workers to the number of replicas on each; even blocks by default.
        seed: seed all random generators of replica r with seed + r after the model was built. If None, all replicas
            start with the random state of the program, as in a DDP script with one seed.
        policies: policies that adapt the job while it runs, after those of `pliant run --policy`.
        monitor: what to measure, and every how many steps: {"noise_scale": 1, "variance": 8}. Policies add what they
            need.
        record: a file to append the facts of the run to. Its decisions can be replayed.
        replay: such a file. Its decisions on batch sizes and learning rates replace those of the policies.
        verify: compare the states of all workers every so many steps, and in the first step after each change of
            workers; 0: never. 100 by default. `pliant run --verify` overrides it.
        allow: operators that may run although torch has no deterministic kernel for them, by the names that the error
            shows, besides those of `pliant run --allow`. The job prints and records that bits are not promised.
    """
    job: Job | None = None
    board = ProgressBoard()
    try:
        spec = worker_spec()
        started_as = spec.view.rank_of(spec.worker)
        board = ProgressBoard.open(spec)
        report_uncaught(lambda: job.rank if job is not None else started_as, partial(note_failure, spec))
        show_as(program_name(), started_as)
    except NotLaunched:
        spec = None
    if replicas is not None and (isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1):
        raise ConfigError(f"replicas={replicas!r}: use a number of 1 or more, or None for one per worker")
    if verify is not None and (isinstance(verify, bool) or not isinstance(verify, int) or verify < 0):
        raise ConfigError(f"verify={verify!r}: use a number of steps, or 0 for never")
    if gradients not in ("device", "host"):
        raise ConfigError(f"gradients={gradients!r}: use 'device' or 'host'")
    if seed is not None:
        seed = whole_number(f"seed={seed!r}", seed)
    if blocks is not None and not callable(blocks):
        raise ConfigError(f"blocks={blocks!r}: use a function from the number of workers to the replicas on each")
    if not isinstance(policies, Sequence):
        raise ConfigError(f"policies={policies!r:.60}: use a list of policies")
    if not isinstance(monitor or {}, Mapping):
        raise ConfigError(f"monitor={monitor!r}: use a dict of steps, such as {{'noise_scale': 1}}")
    if spec is not None and spec.verify is not None:
        verify = spec.verify
    level = _level(determinism, spec)
    allowed = check_allowed([*check_allowed(allow), *(spec.allow if spec is not None else ())]) if level != "D0" else ()
    check_sync_options(sync, slice_bytes, in_flight_bytes)
    settings = JobSettings(
        replicas,
        level,
        blocks,
        seed,
        sync,
        slice_bytes,
        in_flight_bytes,
        adaptation_settings(spec, policies, monitor or {}, record, replay),
        verify=EVERY if verify is None else verify,
        gradients=gradients,
        allow=allowed,
        order=_order(order, spec),
    )
    job = Job(spec, settings, board)
    if spec is not None:
        shown = [started_as]

        def show_rank(event: StepCommitted) -> None:
            if event.rank != shown[0]:
                shown[0] = event.rank
                show_as(program_name(), event.rank)

        job._run.listeners.add_occasional(show_rank)  # ranks change with the workers only
    return job


def _level(asked: str | None, spec: WorkerSpec | None) -> Level:
    given = spec.determinism if spec is not None else ""
    if asked and given and asked.upper() != given.upper():
        raise ConfigError(f"determinism={asked!r} in the program, but --determinism {given}: give one of them")
    return level_of(asked or given or "D1")


def _order(asked: str | None, spec: WorkerSpec | None) -> Order | None:
    """Return the order that the program or `pliant run` asks for; None for the default of the device."""
    given = spec.order if spec is not None else ""
    if asked and given and asked != given:
        raise ConfigError(f"order={asked!r} in the program, but --order {given}: give one of them")
    wanted = asked or given
    if not wanted:
        return None
    for known in EXACT_ORDERS:
        if wanted == known:
            return known
    raise ConfigError(f"order={wanted!r} is unknown: use one of {', '.join(map(repr, EXACT_ORDERS))}")
