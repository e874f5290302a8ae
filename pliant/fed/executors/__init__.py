"""Who does units: the process `executor`, the server's `pool` of them, what travels between the two, and `launch`, which starts them.

Neither how many there are, nor where, nor what becomes of them changes a bit of a job.
"""
