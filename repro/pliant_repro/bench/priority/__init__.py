"""`pliant bench priority`: ways to synchronise beside stock DDP, over the rates of the links, against what P3 published."""
