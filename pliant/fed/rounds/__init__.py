"""The rounds of a federated job on its virtual clock. `loop.simulate` runs all of them."""
