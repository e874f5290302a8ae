"""More and more hosts: ours beside DDP and Open MPI, and launch orders of device groups. KungFu's figures 9 and 10 are made from these."""
