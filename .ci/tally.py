"""Print CI's last lines, how many tests ran and what did not: `python .ci/tally.py NAME=JUNIT.xml ... [-- WHAT_DID_NOT_RUN ...]`.

A run without any test is an error.
"""

import sys
from collections import Counter
from xml.etree import ElementTree

Test = tuple[str, str]  # the module and the name


def read(path: str) -> tuple[set[Test], dict[Test, str]]:
    """Return the tests that a run of pytest has run, and those that it has skipped with the reasons."""
    run: set[Test] = set()
    skipped: dict[Test, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        test = (case.get("classname") or "", case.get("name") or "")
        reason = case.find("skipped")
        if reason is None:
            run.add(test)
        else:
            skipped[test] = str(reason.get("message"))
    return run, skipped


def main(arguments: list[str]) -> int:
    """Print a line for each run, and then what no run has run."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    missing = arguments[split + 1 :]
    ever: set[Test] = set()
    never: dict[Test, str] = {}
    empty = False
    for argument in arguments[:split]:
        name, _, path = argument.partition("=")
        run, skipped = read(path)
        print(f"CI: {name}: {len(run)} tests run, {len(skipped)} skipped")
        ever |= run
        never |= skipped
        empty = empty or not run
    modules = {module for module, _ in ever}
    # A module that is skipped as a whole stands there as a test of that name.
    left = Counter(reason for (module, name), reason in never.items() if (module, name) not in ever and name not in modules)
    missing += [f"{count} skipped: {reason}" for reason, count in left.most_common()]
    print("CI: a run without tests" if empty else f"CI: did not run: {'; '.join(missing) or 'nothing'}")
    return int(empty)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
