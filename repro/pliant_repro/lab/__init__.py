"""Hosts on one machine: network namespaces on one bridge, with rates, made and removed by one `with`.

    with Lab(num_hosts=4, rate="1gbit").up() as lab:
        lab.run(0, ["ping", "-c1", lab.addresses[1]])

`hosts` has the `Lab`, `namespaces` what the kernel has of it, `guardian` the process that removes it when its owner ends, `rates`
what is said to `tc`, and `machine` what a machine lacks for one. Needs root. Knows nothing about workers or training.
"""
