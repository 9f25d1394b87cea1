"""Check that the sdist holds every file that git knows: `python .ci/sdist.py SDIST.tar.gz`."""

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    with tarfile.open(sys.argv[1]) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    if missing := sorted(set(known) - held):
        sys.exit(f"the sdist lacks {', '.join(missing)}: see MANIFEST.in")
    print(f"the sdist holds all {len(known)} files that git knows")
