"""The figures of the KungFu paper (OSDI 2020), and the programs that they run."""
