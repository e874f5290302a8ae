"""Adaptive communication strategy (KungFu's artifact, section 4.2), under the path that the artifact has it.

    pliant run -q -np 8 -strategy STAR -H $HOSTS -nic eth0 python3 experimental/adapt_strategy/adapt_strategy.py --adapt --kf-optimizer=sync-sgd-monitor

On every host, or once with --ssh. See `pliant/experiments/kungfu/adapt_strategy.py` for what it does, and --help for its flags.
"""

from pliant_repro.figures.kungfu import img_sec
from pliant_repro.figures.kungfu.adapt_strategy import main

if __name__ == "__main__":
    img_sec.run_program(main)
