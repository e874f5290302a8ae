"""Who takes part in a round, and who tests a model. Pure: clients are arrays, and clocks, traces and models are unknown here.

`selectors.make` knows all selectors by their names; `testing` is for models that are done.
"""
