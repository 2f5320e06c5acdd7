"""What the methods of the paper capture on the interpolating digits, against exact Y.

Claims: MAGE's relative Frobenius error is the lowest of the computable methods and within 15 % of
the rank-B SVD; SPELL's mean captured share of row norms, ‖Ŷ_q‖ / ‖Y_q‖, is the highest wherever
B ≥ 0.2 k. Exits with 1 where one does not hold.

    python -m benchmarks.shares            # some minutes on one core
"""

import argparse
import datetime
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import metasketch as ms
from benchmarks.digits import COMPUTABLE, simulated
from benchmarks.problems import hard

SIZES, SHARES = (200, 400), (0.2, 0.3, 0.5)


def rows(seed: int) -> Iterator[tuple[str, bool]]:
    """A line of the table for each number of queries and budget, and whether the claims hold."""
    recipe, queries = hard(seed)
    run = ms.train(recipe)
    every = torch.from_numpy(ms.attribute(run, queries, "exact").dense())
    gram = queries.gram(run)
    for k in SIZES:
        Y, G = every[:k], gram[:k, :k]
        norms, energies = Y.norm(dim=1), torch.linalg.svdvals(Y).square()
        orders = float((norms.max() / norms.min()).log10())
        for B in (round(share * k) for share in SHARES):
            estimates = {m: simulated(Y, G, m, B).dense() for m in COMPUTABLE}
            found = {m: judged(torch.from_numpy(Y_hat), Y) for m, Y_hat in estimates.items()}
            best = float((energies[B:].sum() / energies.sum()).sqrt())
            ratio = found["mage"][0] / best
            lowest = min(found, key=lambda m: found[m][0]) == "mage"
            highest = max(found, key=lambda m: found[m][1]) == "spell"
            cells = " | ".join(f"{error:.4f}, {share:.3f}" for error, share in found.values())
            line = f"| {seed} | {k} | {orders:.1f} | {B} | {cells} | {best:.4f} | {ratio:.2f} |"
            yield line, lowest and ratio <= 1.15 and highest


def judged(Y_hat: Tensor, Y: Tensor) -> tuple[float, float]:
    """Relative Frobenius error, and the mean share of row norms that is captured: for a projection
    ‖Ŷ_q‖ / ‖Y_q‖, else 1 - ‖Y_q - Ŷ_q‖² / ‖Y_q‖², which may be negative."""
    size, missed = Y.square().sum(1), (Y - Y_hat).square().sum(1)
    inner = (Y_hat * (Y - Y_hat)).sum(1).abs()
    projected = bool((inner <= 1e-6 * size).all())
    share = (Y_hat.norm(dim=1) / size.sqrt()) if projected else 1 - missed / size
    return float((missed.sum() / size.sum()).sqrt()), float(share.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, metasketch {ms.__version__}, torch {torch.__version__}\n")
    print("Relative Frobenius error, and mean captured share of row norms:\n")
    print(f"| seed | k | orders | B | {' | '.join(COMPUTABLE)} | SVD | MAGE / SVD |")
    print("|---|---|---|---|" + "---|" * (len(COMPUTABLE) + 2))
    held = []
    for seed in range(parser.parse_args().seeds):
        for line, holds in rows(seed):
            print(line, flush=True)
            held.append(holds)
    print(f"\nthe claims hold in {sum(held)} of {len(held)} settings")
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
