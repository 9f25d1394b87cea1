"""Files that are wrong in every way: seeded mutations of small models, plans, data and reports, and every command run on them.

    python -m tests.fuzz --models 2000 --others 500        the long run, by hand
    python -m tests.fuzz --case models:17                  one case again, and what it said

The rules: exit code 0 or 1, no traceback, nothing "unexpectedly", no more than 20 CPU seconds, all files of a result or none,
and a result that is accepted is the masked model's own function, as ONNX Runtime finds without us.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tiny` and `random_cnn`, where pytest has not done so
