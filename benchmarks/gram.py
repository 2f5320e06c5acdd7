"""The Gram matrix of 1,000 queries of a model with ten million parameters, in 4 GiB.

The query gradients, held whole, would take 75 GiB. Prints the time, the gradients that were made,
and the most memory that the process took above what it held before; compares some entries with
gradients made one by one. Exits with 1 where the budget was overrun or an entry is off.

    python benchmarks/gram.py                    # some ten minutes on one core
    python benchmarks/gram.py --queries 100 --width 400 --memory 64MiB
"""

import argparse
import datetime
import sys
import time

import torch
from memory_use import high_water, resident, restart
from torch import nn

import metasketch as ms
from metasketch.query_gradients import QueryGradients
from metasketch.sizes import format_bytes, parse_bytes

INPUTS, CLASSES, CHECKED = 784, 10, 5


def problem(width: int, num_queries: int) -> tuple[ms.Run, ms.Queries]:
    """A run of one step of an MLP with two hidden layers, and its queries, on random data."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(INPUTS, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip
    x, y = torch.randn(num_queries, INPUTS), torch.randint(CLASSES, (num_queries,))
    recipe = ms.Recipe(
        net, ms.losses.cross_entropy, (x[:64], y[:64]), ms.SGD(lr=0.01), batches=[range(64)]
    )
    run = ms.train(recipe, memory="2 states", progress=False)
    return run, ms.Queries((x, y), ms.losses.cross_entropy)


def worst_entry(run: ms.Run, queries: ms.Queries, G: torch.Tensor) -> float:
    """How far some entries are from inner products of gradients made one by one, relative to the
    sizes of the two."""
    with run.computing():
        V = QueryGradients(queries.of(run))
        chosen = torch.linspace(0, queries.num_queries - 1, CHECKED).long().tolist()
        rows = torch.stack([V.row(q)[: run.num_params] for q in chosen])
    expected = rows @ rows.T
    sizes = expected.diagonal().sqrt()
    return float(((G[chosen][:, chosen] - expected).abs() / sizes / sizes[:, None]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--width", type=int, default=2775)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    budget = parse_bytes(args.memory, "memory")
    run, queries = problem(args.width, args.queries)
    with run.computing():
        V = QueryGradients(queries.of(run), budget)
        gradients = V.num_gradients()
        V.row(0)  # what torch loads at first use does not count
    before, start = resident(), time.perf_counter()
    restart()
    G = queries.gram(run, memory=budget)
    seconds, peak = time.perf_counter() - start, high_water() - before
    gap = worst_entry(run, queries, G)
    whole = args.queries * run.num_params * 8
    print(f"{datetime.date.today()}, metasketch {ms.__version__}, torch {torch.__version__}")
    print(f"  parameters        {run.num_params:,}")
    print(f"  queries           {args.queries:,}, whose gradients take {format_bytes(whole)}")
    print(f"  gradients made    {gradients:,} in {seconds:.0f} s on {args.threads} threads")
    print(f"  peak of memory    {format_bytes(peak)} of {format_bytes(budget)}")
    print(f"  worst entry       off by {gap:.1e} of the sizes of its two gradients")
    sys.exit(not (peak <= 1.1 * budget and gap < 1e-6))


if __name__ == "__main__":
    main()
