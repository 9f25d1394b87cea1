"""`python -m tests.fuzz`: the long run."""

import argparse
import sys
import time

from .cases import Outcome
from .driver import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Run every command on files that are wrong.")
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--others", type=int, default=500, help="plans, data and report files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", action="append", default=[], metavar="KIND:N", help="only this case, and show what it said")
    args = parser.parse_args()
    cases = args.case or [f"models:{i}" for i in range(args.models)] + [f"others:{i}" for i in range(args.others)]
    begun = time.monotonic()

    def tell(outcome: Outcome) -> None:
        if args.case:
            print(outcome.what, *outcome.said, sep="\n")
        for what in outcome.wrong:
            print(f"{outcome.case} ({outcome.what}): {what}", flush=True)

    figures = fuzz(cases, seed=args.seed, tell=tell)
    print(str(figures).splitlines()[-1], f"in {time.monotonic() - begun:.0f} s")
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
