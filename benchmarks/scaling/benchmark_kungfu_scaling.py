"""How long changes of the number of workers take, as KungFu's benchmark of the same name has it; under pliant.

    pliant run -w -config-server http://10.0.0.19:9100/get -H 10.0.0.19:1,10.0.0.20:1 -nic eth0 -np 1 \
        python3 benchmarks/scaling/benchmark_kungfu_scaling.py --tf-method estimator --elastic \
        --resize-schedule 10:2,100:0 --train-steps 100 --epoch-size 10000

(or `--ssh -hostfile hosts.txt` in place of a command on each host). The first worker asks for the next size after the steps
of the schedule, and whoever was there before prints `resize 1 -> 2 took ...`: the pause between two steps. As in KungFu each
worker trains on a batch of its own, so the batch of all grows and shrinks with them.
"""

from __future__ import annotations

from pliant_repro.figures.kungfu.img_sec import run_program
from pliant_repro.figures.kungfu.scaling import main

if __name__ == "__main__":
    run_program(main)
