"""Hosts on one machine: network namespaces on one bridge, with rate limits, made and removed by one `with`.

    with Lab(num_hosts=4, rate="1gbit").up() as lab:
        lab.run(0, ["ping", "-c1", lab.addresses[1]])

`hosts` has the `Lab`, `namespaces` the kernel's side of it, `guardian` the process that removes it when its owner ends, `rates`
the arguments of `tc`, and `iperf` the measured rates. A lab needs root. It knows nothing about workers or training.
"""
