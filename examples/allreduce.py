"""Use the engine without a training loop: every worker contributes its rank + 1, and all get the sum.

pliant run -np 4 examples/allreduce.py
"""

from pliant.elastic.member import Session


def main() -> None:
    with Session.join() as session:
        engine = session.engine
        tensor = engine.empty(4)
        tensor.fill_(engine.rank + 1)
        engine.all_reduce("greeting", tensor).wait()
        print(f"rank {engine.rank} of {engine.size}: sum over ranks {tensor.tolist()}")


if __name__ == "__main__":
    main()
