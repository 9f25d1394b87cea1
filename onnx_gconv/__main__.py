"""`python -m onnx_gconv` is `onnx-gconv`."""

import sys

from onnx_gconv.cli.main import main

sys.exit(main())
