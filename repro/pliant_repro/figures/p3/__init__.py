"""The figures of the P3 paper (MLSys 2019), made from contests of `bench.priority`."""
