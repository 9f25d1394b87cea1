"""Before any test imports NumPy: one thread for each product of matrices, as the command sets it for itself.

With more, sums are added in another order, and what a test runs in this process would differ in its last bits from what the
command makes in one of its own.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
