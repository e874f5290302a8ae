"""The cluster: where a job's replicas go, which job gets which devices, and what a cluster of many jobs would do. Torch-free."""
