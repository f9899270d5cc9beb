"""The classifier of a probe: logistic regression on frozen features, the same for every contestant.

scikit-learn is an extra, `probe`, and imported where it is used.
"""

import math
import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata import derive_key

_STRENGTHS = (0.01, 0.1, 1.0)
_MOST_FOLDS = 3
_QUANTILE = 1.959964  # of the normal distribution, for an interval of 95 %


class ProbeScore(NamedTuple):
    """Share of the held-out utterances that are recognised."""

    accuracy: float
    low: float
    """Bounds of the 95 % interval (Wilson), as if the utterances were independent of each other."""

    high: float

    @classmethod
    def of(cls, num_correct: int, number: int) -> "ProbeScore":
        """Returns the score of so many out of a number."""
        share, z2 = num_correct / number, _QUANTILE**2 / number
        centre = (share + z2 / 2) / (1 + z2)
        half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
        return cls(share, max(0.0, centre - half), min(1.0, centre + half))


def score_held_out(
    features: NDArray[np.float32], labels: NDArray[np.int64], is_held: NDArray[np.bool_], seed: int
) -> ProbeScore:
    """Trains on what is not held out, and scores what is."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train_labels = labels[~is_held]
    num_folds = min(_MOST_FOLDS, *Counter(train_labels.tolist()).values())
    folds = StratifiedKFold(num_folds, shuffle=True, random_state=derive_key(seed, "probe folds") % 2**32)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=100, tol=1e-2))
    search = GridSearchCV(classifier, {"logisticregression__C": list(_STRENGTHS)}, cv=folds)
    with warnings.catch_warnings():
        # Where regularisation is weak, it ends before the last digit; for all contestants alike.
        warnings.simplefilter("ignore", ConvergenceWarning)
        search.fit(features[~is_held], train_labels)
    num_correct = int((search.predict(features[is_held]) == labels[is_held]).sum())
    return ProbeScore.of(num_correct, int(is_held.sum()))
