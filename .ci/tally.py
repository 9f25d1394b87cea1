"""Print how many tests ran, for CI's last lines: `python .ci/tally.py NAME=JUNIT.xml ...`. None run at all is an error."""

import sys
from collections import Counter
from xml.etree import ElementTree


def tally(name: str, path: str) -> int:
    """Print one line for a run of pytest, and one for each reason to skip; return the number of tests run."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    reasons = Counter(str(skipped.get("message")) for case in cases for skipped in case.iter("skipped"))
    run = len(cases) - reasons.total()
    print(f"CI: {name}: {run} tests run, {reasons.total()} skipped")
    for reason, count in reasons.most_common():
        print(f"CI:   {count} skipped: {reason}")
    return run


if __name__ == "__main__":
    counts = [tally(*argument.split("=", 1)) for argument in sys.argv[1:]]
    if not all(counts):
        sys.exit("CI: a run without tests")
