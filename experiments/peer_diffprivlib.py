"""diffprivlib's LogisticRegression on one problem, run by a Python of its own.

    PYTHON experiments/peer_diffprivlib.py FILE.npz

diffprivlib 0.6.6 needs scikit-learn below 1.7, so it lives in an environment of its own:

    python -m venv peer && peer/bin/pip install diffprivlib 'scikit-learn<1.7'

Reads lines "EPSILON DATA_NORM C" and answers each by the decision values of the test rows, as JSON.
This file imports nothing of dpspan.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np


def main() -> None:
    """Fit to x_train, y_train and score x_test, as often as asked."""
    from diffprivlib.models import LogisticRegression

    data = dict(np.load(sys.argv[1]).items())
    for line in sys.stdin:
        epsilon, data_norm, penalty = map(float, line.split())
        model = LogisticRegression(epsilon=epsilon, data_norm=data_norm, C=penalty, max_iter=300)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows longer than data_norm are clipped, as meant
            model.fit(data["x_train"], data["y_train"])
        print(json.dumps(model.decision_function(data["x_test"]).tolist()), flush=True)


if __name__ == "__main__":
    main()
