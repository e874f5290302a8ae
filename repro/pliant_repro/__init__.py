"""Contests with peers, the figures of the four papers, and the network lab: a plug-in of the `pliant` command line."""
