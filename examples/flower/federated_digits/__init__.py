"""A Flower app that learns handwritten digits where they are; pliant picks who takes part."""
