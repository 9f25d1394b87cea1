"""`python -m onnx_gconv` is `onnx-gconv`."""

import os
import sys

# `python -m` looks for every module in the current folder first. What lies there is not ours to run; unless we lie there ourselves.
if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    here = os.path.abspath(sys.path.pop(0) or os.curdir)
    if here == os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        sys.path.append(here)

from onnx_gconv.cli.main import main

sys.exit(main())
