"""A job on a Ray cluster (`pliant run --on ray`): the driver here, a runner on each node, and the devices that they hold."""
