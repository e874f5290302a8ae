"""Between two workers: what travels, who may connect, and one connection. What frames mean is `comm.collective`'s."""
