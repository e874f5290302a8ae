"""`pliant bench fed`: how fast clients are chosen and simulated, beside plain Python and Flower."""
