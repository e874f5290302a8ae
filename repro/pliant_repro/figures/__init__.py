"""The papers' figures, the demo, and the training program that both are measured with."""
