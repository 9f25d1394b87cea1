"""A process that runs one case after the other: `python -m tests.fuzz.worker SEED < cases`, an outcome a line.

It dies of a case that takes too much CPU time, also where that is inside a library: whoever started it starts another one.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import warnings
from contextlib import chdir
from dataclasses import asdict

from .cases import run_case

CPU_SECONDS = 20
MOST_BYTES = 6 * 2**30  # of address space


def main() -> None:
    seed = int(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        # Python has no handler for it: the system ends the process.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            outcome = run_case(line.strip(), seed)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


if __name__ == "__main__":
    main()
