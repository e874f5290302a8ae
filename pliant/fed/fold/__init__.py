"""What many clients' updates become: the next model, folded in the order of clients; updates made private, and their account.

`aggregators` knows all ways by their names.
"""
