"""Use the engine with NumPy arrays, for programs in JAX, TensorFlow or plain NumPy.

pliant run -np 4 examples/numpy_allreduce.py

The program fits a line to points that are spread over the workers: each worker computes the gradient of its own points, and the
engine sums the gradients in place. Copy an array that cannot be written to, such as JAX's, first: `total = np.array(x)`, and
`jnp.asarray(total)` afterwards.
"""

import numpy as np

from pliant.elastic.member import Session


def main() -> None:
    with Session.join() as session:
        engine = session.engine
        draw = np.random.default_rng(engine.rank)  # every worker has points of its own
        x = draw.uniform(-1, 1, 1000)
        y = 3 * x - 1 + draw.normal(0, 0.1, 1000)

        line = np.zeros(2)
        engine.broadcast("line", line, root=0).wait()  # needed by a program that begins with random numbers
        for _ in range(200):
            error = line[0] * x + line[1] - y
            gradient = np.array([error @ x, error.sum()]) / len(x)
            engine.all_reduce("gradient", gradient).wait()  # all_reduce returns at once; wait blocks
            line -= 0.3 * gradient / engine.size

        rows = engine.all_gather("lines", line).wait()
        same = all(np.array_equal(np.asarray(row), line) for row in rows)
        print(f"rank {engine.rank}: y = {line[0]:.4f} x + {line[1]:.4f}, everywhere the same bits: {same}", flush=True)


if __name__ == "__main__":
    main()
