"""The linear probe: logistic regression on frozen features, with the same settings for every set of features.

scikit-learn belongs to the extra `probe` and is imported inside the function that uses it.
"""

import importlib.util
import math
import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata import derive_key
from nestmodel.errors import ConfigError

_INVERSE_REGULARISATION = (0.01, 0.1, 1.0)
_MAX_FOLDS = 3
_NORMAL_QUANTILE = 1.959964  # for an interval of 95 %


class ProbeScore(NamedTuple):
    """Accuracy on the held-out utterances, with its confidence interval."""

    accuracy: float
    """Share of the held-out utterances whose label is predicted."""

    low: float
    """Lower bound of the 95 % Wilson interval, which treats the utterances as independent."""

    high: float
    """Upper bound of that interval."""

    @classmethod
    def from_counts(cls, num_correct: int, num_scored: int) -> "ProbeScore":
        """Returns the score for `num_correct` correct predictions out of `num_scored`."""
        share, z2 = num_correct / num_scored, _NORMAL_QUANTILE**2 / num_scored
        centre = (share + z2 / 2) / (1 + z2)
        half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
        # The interval contains the share; by rounding, its bound could be 1e-16 beyond a share of 0 or 1.
        return cls(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def fit_and_score(
    features: NDArray[np.float32], labels: NDArray[np.int64], is_held_out: NDArray[np.bool_], seed: int
) -> ProbeScore:
    """Fits logistic regression to the training utterances and scores it on the held-out utterances.

    Features are standardised. Cross-validation on the training utterances selects the strength of the regularisation.

    Args:
        features: Shape (utterances, dim).
        labels: Class number of each utterance, shape (utterances,).
        is_held_out: True for the utterances that are scored; the others are used for training.
        seed: Determines the folds of the cross-validation.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train_labels = labels[~is_held_out]
    num_folds = min(_MAX_FOLDS, *Counter(train_labels.tolist()).values())
    folds = StratifiedKFold(num_folds, shuffle=True, random_state=derive_key(seed, "probe folds") % 2**32)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=100, tol=1e-2))
    search = GridSearchCV(classifier, {"logisticregression__C": list(_INVERSE_REGULARISATION)}, cv=folds)
    with warnings.catch_warnings():
        # With weak regularisation, the solver stops before it has converged; the limit is the same for all features.
        warnings.simplefilter("ignore", ConvergenceWarning)
        search.fit(features[~is_held_out], train_labels)
    num_correct = int((search.predict(features[is_held_out]) == labels[is_held_out]).sum())
    return ProbeScore.from_counts(num_correct, int(is_held_out.sum()))


def check_sklearn(what: str = "a probe") -> None:
    """Raises ConfigError if scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(f"{what} needs scikit-learn: pip install 'nest-pretrain[probe]'.")
