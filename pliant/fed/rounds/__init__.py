"""A job on its virtual clock, from the first round to the last: who makes a round, what follows from it, and what is kept of it.

`loop.simulate` is all of it. By whom units are done is an argument.
"""
