"""Full conformal prediction as a scikit-learn classifier."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import pvalues
from fullconformal.estimators.base import ConformalWarning
from fullconformal.estimators.checks import check_flag, check_weights
from fullconformal.estimators.inputs import encode_labels, first_rows
from fullconformal.estimators.trust import FullTrust
from fullconformal.last_layer.stream import Stream, is_stream
from fullconformal.methods.convex import Symmetric
from fullconformal.methods.fitting import fit_transformer
from fullconformal.methods.last_layer import check_stream, prefit_engine
from fullconformal.methods.making import make_engine
from fullconformal.models.requirements import split_pipeline
from fullconformal.runtime.progress import progress_bar


class FullConformalClassifier(FullTrust):
    """Prediction sets by full conformal prediction from one fit: every labelled point trains and calibrates.

    Parameters
    ----------
    estimator : None, nn.Module, scikit-learn classifier, skorch net, or Pipeline ending in one, default=None
        The classifier. None is a multinomial logistic regression. A module maps a batch to logits. Of scikit-learn's,
        LogisticRegression, MLPClassifier and KNeighborsClassifier; with ``method="exact"`` any with predict_proba.
    method : {"auto", "influence", "symmetric", "exact"}, default="auto"
        "influence" is the paper's approximation, for every model. "symmetric" is exactly valid, for convex models: logistic
        regressions, and networks with `head`. "exact" is full CP itself: by fast solvers for logistic regressions, by updates
        for k-NN and kernel densities, by honest refits for anything else. "auto" is exact for k-NN and kernel densities,
        symmetric where the fit is convex (unless an option of influence is given), else influence.
    scheme : {"deleted", "studentized", "ordinary"}, default="deleted"
        Whether a point's score is its loss without it (q = 1), half-way (q = ½), or with it (q = 0).
    approximation : {"direct", "indirect", "newton"}, default="direct"
        Of the influence on the loss; of the model evaluated at shifted parameters; by a Newton step with updated curvature.
    curvature : str or Curvature, default="auto"
        The matrix 𝓗: "hessian"; "ggn", the Gauss–Newton matrix, for linear models the Hessian; "dual" and "cg" are the same without writing
        it out, for n·C < p and for moderate n. "block" keeps what lies within layers, "ekfac" and "kfac" approximate that for Linear
        and Conv2d layers of any size, "last_layer" is the GGN of the last linear layer; what they leave out is held fixed.
        "last_layer_kron" approximates that by a Kronecker product: millions of points and thousands of classes, from one pass. "auto"
        is the GGN where it fits memory_budget and ten minutes, else "dual" where that does, else "ekfac", else "last_layer"; `diagnose`
        shows the choice and the estimates.
    damping : float, optional
        Added to the mean-form curvature. By default 0 where the factorisation succeeds, else the smallest that works.
    l2 : float, optional
        λ of (1/n)Σℓ + (λ/2)|θ|², for the built-in logistic regression (default 1e-3, intercept free) and modules (default 1e-2, all
        parameters). scikit-learn and skorch estimators bring their own.
    prefit : bool, default=False
        Take the estimator as it is; `fit` is then given the data it was trained on.
    head : str, optional
        Name of a network's last linear layer, or "auto" to find it. All before it is frozen and the head refitted as a logistic
        regression. Exactly valid where the rest was not trained on the data given to `fit` (a pretrained backbone, with
        ``prefit=True``); where it was, only approximately.
    confidence_level : float, default=0.9
        Of the sets, where `predict_set` is not told otherwise.
    class_conditional : bool, default=False
        Compare a candidate with the training points of its own label only: the guarantee then holds for each class.
    prune : {"auto", True, False}, default="auto"
        Skip products whose outcome is certain; p-values are the same. "auto": where the curvature is positive definite and
        it is estimated to be faster.
    max_epochs : int, default=200
        Of Adam, for modules that are trained here; L-BFGS follows until the gradient is small. 0 leaves all to that, from the
        module's own weights.
    device : str, default="auto"
        "auto" is CUDA where there is one for modules, the CPU for the rest, whose products are small.
    dtype : {"auto", "float32", "float64"}, default="auto"
        "auto" is the module's own; float64 for linear models.
    memory_budget : float, default=4.0
        GiB that the curvature, what is kept of the training points, and the blocks may take together.
    n_jobs : int, optional
        Workers for refits (``method="exact"`` of models without a fast solver) and for influence, as joblib counts them. Inside
        ``joblib.parallel_config(backend="dask")`` the work goes to Dask's cluster, whatever n_jobs is. By default one process.
    checkpoint : path, optional
        Folder for the parts that refits and influence have finished: a killed `fit` or `predict_p` started again with the same data and
        options goes on from there. Without `random_state` training is then seeded by 0, so that it is the same again.
    random_state : int, RandomState or None, default=None
        Seeds training and the smoothing of p-values.
    verbose : int, default=0
        1 shows progress bars, and the choice of the curvature.

    Attributes
    ----------
    classes_ : ndarray (C,)
    n_samples_fit_ : int
        Number of points learnt from.
    method_ : str
        The method that was taken.

    Notes
    -----
    ``scheme``, ``class_conditional``, ``confidence_level`` and, with influence, ``approximation`` and ``prune`` may be changed by
    `set_params` after `fit`; other parameters are read when fitting.

    In a Pipeline the transformers are fitted once, to the training data. A guarantee in the strict sense would refit them for every
    candidate: where they only look at X the difference is hardly to be measured, where they look at labels `fit` warns.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import FullConformalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = FullConformalClassifier(l2=0.01).fit(X[::2], y[::2])
    >>> clf.predict_p(X[1:2]).shape
    (1, 3)
    >>> [list(map(int, labels)) for labels in clf.predict_set(X[[1, 99]], as_labels=True)]
    [[0], [1]]
    """

    # Fitting ----------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> FullConformalClassifier:
        """Fit the model to all of (X, y) and prepare what every prediction needs.

        Parameters
        ----------
        X : array-like (n, ...)
            Objects; an array, DataFrame or tensor. With ``prefit=True``, those the model was trained on. With ``prefit=True`` and a
            curvature of the last layer also a memory-mapped array, which is read batch by batch, or a
            ``torch.utils.data.Dataset`` or ``DataLoader`` of pairs (object, label), read once, in any order.
        y : array-like (n,)
            Labels; None where X yields them, which must then be the indices of the network's outputs.
        """
        self._check_params()
        head, final = split_pipeline(self.estimator)
        if is_stream(X):
            check_stream(self, y)
            self._fit_stream(X)
            return self._tell()
        X, y = self._checked(X, y, reset=True)
        self.classes_, index = encode_labels(y)
        self.n_samples_fit_ = len(index)
        self.method_ = self._method(final)
        self._sample = first_rows(X)
        self._transformer, X = fit_transformer(head, X, y, self.prefit)
        if self.method_ == "influence":
            self._check_memory(final, X, len(self.classes_))
        self._input_shape = tuple(X.shape[1:])
        with progress_bar("training", bool(self.verbose)) as progress:
            settings = self._settings(progress)
            self._labels = index
            self._recalibration = None
            self._engine = make_engine(self, self.method_, self.classes_, final, X, index, settings)
        return self._tell()

    def _fit_stream(self, X: Any) -> None:
        """Fit to the pairs (object, label) that a dataset or loader yields."""
        self.method_, self._transformer, self._recalibration = "influence", None, None
        for name in ("n_features_in_", "feature_names_in_", "_sample"):  # of an earlier fit to arrays
            self.__dict__.pop(name, None)
        with progress_bar("training points", bool(self.verbose)) as progress:
            engine = prefit_engine(self, Stream(X), progress)
        self.classes_, self._labels, self._input_shape = np.arange(engine.n_classes), engine.labels, engine.input_shape
        self.n_samples_fit_ = len(self._labels)
        self._engine = engine

    def _tell(self) -> FullConformalClassifier:
        """Warn of what must be known before the sets are trusted."""
        told = [self._caveat] if self._engine.valid else self._engine.warnings
        if any(told):
            warnings.warn(f"{'; '.join(told)}. (clf.diagnose() shows the figures.)", ConformalWarning, stacklevel=3)
        self._check_reachable(np.asarray(self.confidence_level), stacklevel=4)
        return self

    # Prediction -------------------------------------------------------------------------------------------------------

    def predict_p(
        self, X: Any, *, smoothing: bool = False, weights: tuple[Any, Any] | None = None, bounds: bool = False
    ) -> Any:
        """p-values of every label.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        smoothing : bool, default=False
            Break ties at random: p-values of the true labels are then uniform, not merely larger.
        weights : (array (n,), array (m,)), optional
            Likelihood ratios dQ/dP of the training and the test objects, for covariate shift.
        bounds : bool, default=False
            Return two arrays that enclose the exact symmetric p-values of the ordinary scheme, from one Newton step a
            candidate; sets from the upper are valid. With ``method="symmetric"``.

        Returns
        -------
        ndarray (m, C), or a pair of them
            Columns as in ``classes_``.
        """
        check_flag("smoothing", smoothing)
        X = self._prepare_inputs(X)
        self._check_scores()
        train, own = check_weights(weights, len(self._labels), len(X))
        y = self._labels
        compared: Any = {"class_conditional": self.class_conditional, "weights": train}
        weight = None if self._engine.separable else pvalues.comparison_weight(y, len(self.classes_), **compared)
        total = pvalues.comparison_total(y, len(self.classes_), **compared)
        if bounds and (self.method_ != "symmetric" or smoothing or self._recalibration is not None):
            raise ValueError("bounds=True needs method='symmetric', without smoothing and without recalibration.")
        with progress_bar("p-values", bool(self.verbose)) as progress:
            query = self._query(
                weight=weight, progress=progress, points=train, class_conditional=self.class_conditional
            )
            if bounds:
                assert isinstance(self._engine, Symmetric)
                return tuple(pvalues.p_values(part, 0.0 * part, total, own) for part in self._engine.bounds(X, query))
            greater, equal = self._engine.counts(X, query)
        uniform = self._uniform(X, greater.shape[1]) if smoothing else None
        if self._recalibration is None:
            return pvalues.p_values(greater, equal, total, own, uniform)
        return self._recalibrated(X, pvalues.p_values(greater, equal, total, own), weights, uniform)

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the fitted model; they carry no guarantee."""
        X = self._prepare_inputs(X)
        return np.exp(self._engine.log_proba(X))

    def _name(self) -> str:
        return f"full CP ({self.method_}, {self.scheme})"
