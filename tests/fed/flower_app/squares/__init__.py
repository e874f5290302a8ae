"""A Flower app whose clients do least squares: small enough to be deployed in a test."""
