"""The experiments of the Oort paper (OSDI 2021), from federated jobs that run on this machine."""
