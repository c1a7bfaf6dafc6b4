"""Full conformal prediction as a scikit-learn regressor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.utils import check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted
from torch import nn

from fullconformal.curvature import CURVATURES
from fullconformal.diagnostics import Figures
from fullconformal.estimators import validation
from fullconformal.estimators.base import whole_or_nothing
from fullconformal.estimators.categories import Categories
from fullconformal.estimators.engine import FullConformal
from fullconformal.estimators.inputs import first_rows
from fullconformal.estimators.regression import ConformalRegressor
from fullconformal.estimators.target import Target, learns_values, split_target, without_target
from fullconformal.guarantees import APPROXIMATE, Guarantee
from fullconformal.intervals import Distribution, Steps
from fullconformal.losses import SQUARED
from fullconformal.methods.audit import Audit, audit_regression
from fullconformal.methods.base import FloatArray, Values
from fullconformal.methods.fitting import L2_LINEAR
from fullconformal.methods.regression import FittedRegression, RegressionMethod, RegressionQuery
from fullconformal.methods.select import REGRESSION_METHODS, is_network, select_regression
from fullconformal.methods.transformed import FittedRegressionInBag
from fullconformal.models.requirements import check_module, split_pipeline
from fullconformal.runtime.tasks import progress_bar
from fullconformal.storage import require, savable


@savable
class FullConformalRegressor(FullConformal, ConformalRegressor):
    """Prediction intervals by full conformal prediction from one fit: every point trains and calibrates.

    Parameters
    ----------
    estimator : None, nn.Module, scikit-learn regressor, or Pipeline ending in one, default=None
        The regressor; None is a ridge regression with `l2`. A module maps a batch to numbers (batch, 1) and is trained here by the
        squared loss, on y in units of its standard deviation. A TransformedTargetRegressor gives intervals of y itself.
    method : {"auto", "exact", "influence", "oob", "folds"} or RegressionMethod, default="auto"
        "exact" is full CP itself, for every value of y at once, without refits: for Ridge, RidgeCV, LinearRegression, Lasso, ElasticNet,
        KernelRidge, GaussianProcessRegressor with a fixed kernel (``optimizer=None``) and KNeighborsRegressor; for any other regressor by
        honest refits at some 40 values of each object, which takes long. "oob" scores a point by the
        trees of a forest (RandomForestRegressor, ExtraTreesRegressor with bootstrap=True, BaggingRegressor) that did not draw it: one fit,
        of as many trees as it takes for `n_estimators`, at most a hundred, to score each point; coverage measured and not proved. "folds"
        trains any regressor without each of `folds` folds and scores every point by the model that has not seen it: valid up to the
        candidate's own effect on the other models. "influence", for modules, skorch nets and MLPRegressor, is full CP of a network's
        tangent at the fit (ACP-GN), an approximation. "auto" is exact where that takes no refits, oob for forests, influence for networks
        that came trained (`prefit`) and where a curvature or damping is given, else folds.
    scheme : {"studentized", "deleted", "ordinary"}, default="studentized"
        How a point's residual is scaled by its leverage h: |r|/(1 − h)^q, q = ½, 1 (the residual of the fit without it) or 0. k-NN, oob,
        folds and refits have no leverages: they score a point without it (refits with "ordinary": with it, n times faster).
    confidence_level : float, default=0.9
        Of intervals, where `predict_interval` is not told otherwise.
    categories : str, int or callable, optional
        Compare an object with the training points of its own (Mondrian) category only: the guarantee then holds in each. A column of X, by
        its name or number, or a function that is given X as you give it and returns a word or number for each object, of which it looks
        at each by itself. The model is fitted to all points. An object of a category without training points has an infinite interval.
        (Points that belong together are another matter: `fit`'s ``groups``.)
    l2 : float, optional
        λ of (1/2n)Σr² + (λ/2)|w|² of the built-in regression (1e-3 by default, intercept free) and of modules (1e-2, all parameters).
    curvature : str or Curvature, default="auto"
        Of networks: "ggn", "dual", "ekfac", "kfac" or "last_layer", as for `FullConformalClassifier`.
    damping : float, optional
        Added to the mean-form curvature.
    folds, repeats : int, default=10 and 1
        Of ``method="folds"``: folds, drawn at random, and how often they are drawn; ``folds * repeats`` models are trained. Several
        repeats score a point by its mean prediction, which makes intervals steadier.
    transformers : {"bag", "fixed"}, default="bag"
        How the transformers of a Pipeline are fitted: "bag" fits them anew with each object to predict, which an exact guarantee asks for;
        "fixed" once, to the training objects: faster, and approximate. What learns nothing and a FrozenEstimator stay as they are; so do
        all with "influence" and "oob". Where a transformer looks at y, "auto" takes folds.
    prefit : bool, default=False
        Take a network as it is; `fit` is then given the data it was trained on.
    max_epochs : int, default=200
        Of Adam, for modules that are trained here; L-BFGS follows.
    device : str, default="auto"
        Of modules: "auto" is CUDA where there is one.
    dtype : {"auto", "float32", "float64"}, default="auto"
        Of modules: "auto" is their own.
    memory_budget : float, default=4.0
        GiB that kernel matrices, curvatures and Jacobians may take.
    n_jobs : int, optional
        Workers for folds and refits, as joblib counts them. By default one process.
    checkpoint : path, optional
        Folder for the refits, and the networks of folds, that are finished: a killed run started again with the same data and options goes
        on from there.
    random_state : int, RandomState or None, default=None
        Seeds training and folds; the exact methods have no use for it.
    verbose : int or None, default=None
        1 shows progress bars, 0 nothing; None shows progress where work takes more than about ten seconds.

    Attributes
    ----------
    n_samples_fit_ : int
        Number of points learnt from.
    method_, method_reason_ : str
        The method that was taken, and why.
    transformer_ : Pipeline or None
        The fitted transformers of a Pipeline.

    Notes
    -----
    ``scheme`` and ``confidence_level`` may be changed by `set_params` after `fit`. With ``method="folds"`` the transformers of a Pipeline
    are part of each model, and fitted to what trains it.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from fullconformal import FullConformalRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = FullConformalRegressor(l2=0.001).fit(X[:342], y[:342])
    >>> reg.predict_interval(X[342:344]).round()
    array([[ 72., 261.],
           [ 61., 250.]])
    >>> reg.guarantee_.word
    'exact'
    """

    _fitted: FittedRegression
    _target: Target

    def __init__(
        self, estimator: Any = None, *, method: Any = "auto", scheme: str = "studentized", confidence_level: float = 0.9,
        categories: Any = None, l2: float | None = None, curvature: Any = "auto", damping: float | None = None, folds: int = 10,
        repeats: int = 1, transformers: str = "bag", prefit: bool = False, max_epochs: int = 200, device: str = "auto",
        dtype: str = "auto", memory_budget: float = 4.0, n_jobs: int | None = None, checkpoint: Any = None,
        random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    def _split(self) -> tuple[Any, Any]:
        """Transformers and the model behind them, a transformation of y taken off."""
        transformers, model = split_pipeline(split_target(self.estimator)[0])
        return transformers, split_target(model)[0]

    # Fitting ----------------------------------------------------------------------------------------------------------

    @whole_or_nothing
    def fit(self, X: Any, y: Any, *, groups: Any = None, sample_weight: Any = None) -> FullConformalRegressor:
        """Fit the model to all of (X, y) and prepare what every prediction needs.

        Parameters
        ----------
        X : array-like (n, d)
            Objects.
        y : array-like (n,)
            Their values.
        groups : array-like (n,), optional
            Which points belong together (rows of a patient, say); with ``method="folds"`` they share a fold. An object to predict is taken
            to be of a group of its own.
        sample_weight : array-like (n,), optional
            Weights of points in training; p-values count every point alike. Exact for Ridge and LinearRegression, whose predictions then
            ask for the weights of their objects, too: full CP fits them beside the others. By folds for models whose `fit`
            takes weights. The guarantee asks that a weight comes with its point, as a function of it does.
        """
        self._check()
        self._categories = Categories.of(self.categories, X)
        X, y = self._checked(X, y, reset=True)
        transformers, model = self._split()
        config = self._config(SQUARED)
        whole = learns_values(self.estimator)
        weights = validation.check_sample_weight(self, sample_weight, X)
        known = "" if self.transformers == "fixed" else whole
        selection = select_regression(model, self.method, config, known, weights is not None)
        method = selection.method
        validation.check_takes_weights(method, weights)
        groups = validation.check_groups(groups, len(y), method.name)
        self._target = Target() if method.takes_pipeline and whole else Target.of(self.estimator, y)
        self._sample = first_rows(X)
        if method.takes_pipeline:
            model, transformers = self.estimator if whole else without_target(self.estimator), None
            method = replace(method, model=model)
        bag, learns = Values(X, self._target.forward(y), groups, weights), y if whole else None
        self._fit_method(method, transformers, bag, learns, config, FittedRegressionInBag, selection.reason)
        self._warn(stacklevel=4)
        self.warn_unreachable(np.asarray(self.confidence_level), stacklevel=4)
        return self

    def _check(self) -> None:
        """Raise if a parameter is invalid, before anything long begins."""
        if not isinstance(self.method, RegressionMethod):
            validation.check_option("method", self.method, REGRESSION_METHODS)
        validation.check_level(self.confidence_level)
        validation.check_engine(self, tuple(name for name in CURVATURES if name != "hessian"))
        model = self._split()[1]
        if isinstance(model, nn.Module):
            check_module(model, frozen_allowed=self.prefit)
        else:
            validation.check_regressor(model)
        if self.prefit and not is_network(model):
            raise ValueError("prefit=True needs a trained network; other models are fitted here, which costs little.")
        if self.l2 is not None and model is not None and not isinstance(model, nn.Module):
            raise ValueError(
                f"l2={self.l2!r} was given, but {type(model).__name__} brings its own penalty; set it there."
            )

    # Prediction -------------------------------------------------------------------------------------------------------

    def predict(self, X: Any) -> FloatArray:
        """The model's prediction (m,); it carries no guarantee."""
        inputs = self._prepare_inputs(X)
        return self._target.back(self._fitted.predict(inputs))

    def predict_steps(  # type: ignore[override]
        self, X: Any, *, weights: tuple[Any, Any] | None = None, sample_weight: Any = None
    ) -> Iterator[Steps]:
        """p(y) of all objects as step functions, a block of objects at a time.

        Parameters
        ----------
        X : array-like (m, d)
            Objects.
        weights : (array (n,), array (m,)), optional
            Likelihood ratios dQ/dP of the training objects and of these, for covariate shift.
        sample_weight : array-like (m,), optional
            Weights of the objects in the fit, where `fit` was given those of the training points and the method is exact.

        Yields
        ------
        Steps
        """
        return self._steps(X, weights=weights, sample_weight=sample_weight)

    def _steps(  # type: ignore[override]
        self, X: Any, levels: Any = None, values: Any = None, weights: Any = None, sample_weight: Any = None
    ) -> Iterator[Steps]:
        inputs = self._prepare_inputs(X)
        with progress_bar("intervals", self.verbose) as progress, np.errstate(invalid="ignore", divide="ignore"):
            query = self._query(X, weights, sample_weight)
            values = None if values is None else self._target.forward(values)
            query = replace(query, progress=progress, levels=levels, values=values)
            for steps in self._fitted.steps(inputs, query):
                yield self._target.steps(steps)

    def predict_cdf(self, X: Any, y: Any, *, tau: float = 0.5) -> FloatArray:
        """The conformal predictive distribution at given numbers: how likely the value lies below.

        Parameters
        ----------
        X : array-like (m, d)
            Objects.
        y : array-like (m,) or (m, k)
            One number for each object, or k of them.
        tau : float, default=0.5
            The share, in [0, 1], of the candidate's own place and of ties: 0 and 1 give the lower and the upper bound of the distribution;
            with uniform variables in its place it is exactly calibrated.

        Returns
        -------
        ndarray of the shape of y
        """
        validation.check_number("tau", tau, 0, "a number in [0, 1]", 1)
        return self._at_numbers(X, y, lambda _: self._distributions(X), lambda part, at: part.cdf(at, tau))

    def predict_quantile(self, X: Any, q: Any) -> FloatArray:
        """Quantiles of the conformal predictive distribution: the value lies below with probability q or more.

        Parameters
        ----------
        X : array-like (m, d)
            Objects.
        q : float or sequence of k floats
            Probabilities in (0, 1).

        Returns
        -------
        ndarray (m,), or (m, k)
            Infinite where q needs more points than there are.
        """
        probabilities = np.asarray(q, dtype=np.float64)
        if probabilities.ndim > 1 or not ((probabilities > 0) & (probabilities < 1)).all():
            raise ValueError(f"q={q!r} is not allowed; give a number strictly between 0 and 1, or a sequence of them.")
        found = np.concatenate([part.quantile(probabilities.ravel()) for part in self._distributions(X)])
        return found if probabilities.ndim else found[:, 0]

    def _distributions(self, X: Any) -> Iterator[Distribution]:
        inputs = self._prepare_inputs(X)
        if self._categories is not None:
            raise ValueError("predict_cdf and predict_quantile are of all points together; fit without categories=.")
        query = self._query(X, None, None)
        return (self._target.distribution(part) for part in self._fitted.distributions(inputs, query))

    def _query(self, X: Any, weights: Any, sample_weight: Any) -> RegressionQuery:
        """With whom candidates with the objects X (m, ...), as they were given, are compared."""
        validation.check_option("scheme", self.scheme, tuple(validation.SCHEMES))
        points, own = validation.check_weights(weights, self._fitted.n, _num_samples(X))
        places, kept = self._places(X), self._categories
        apart = None if places is None or kept is None else (kept.points, places)
        if self._fitted.weighs_candidates and sample_weight is None:
            raise ValueError(
                "fit was given sample_weight, and exact full CP fits each object beside the training points: give predictions the "
                "sample_weight of their objects, too, or take method='folds'."
            )
        if sample_weight is not None and not self._fitted.weighs_candidates:
            raise ValueError("sample_weight of objects was given, and this fit has no use for it; leave it out.")
        mass = validation.check_sample_weight(self, sample_weight, X)
        return RegressionQuery(
            validation.SCHEMES[self.scheme], points, None if weights is None else own[:, 0], apart, mass=mass
        )

    # Trust ------------------------------------------------------------------------------------------------------------

    def diagnose(self) -> Figures:
        """What is known of the fit: points, parameters, leverages; prints as a table."""
        check_is_fitted(self)
        figures = self._fitted.figures
        return replace(figures, facts={"method": self.method_, **figures.facts, "guarantee": str(self.guarantee_)})

    def audit(self, X: Any, n_pairs: int = 20, *, max_refits: int = 2000, random_state: Any = 0) -> Audit:
        """Compare with honest refits on random pairs of an object of X and a value.

        Parameters
        ----------
        X : array-like (m, d)
            Objects to draw from.
        n_pairs : int, default=20
        max_refits : int, default=2000
            Where refits without every training point are more than this allows, that many points are drawn at random.
        random_state : int, RandomState or None, default=0

        Returns
        -------
        Audit
            Prints as a table.
        """
        validation.check_audit(n_pairs, max_refits)
        X, model, n = self._prepare_inputs(X), self._split()[1], self._fitted.n
        if self._categories is not None or self._fitted.weighs_candidates:
            raise ValueError(
                "an audit compares with refits among all points: fit with no categories and no sample_weight."
            )
        if isinstance(model, nn.Module) and self._fitted.refits() is None:
            raise ValueError(
                "an audit refits models of scikit-learn's; of a module take method='folds', or MLPRegressor."
            )
        if model is None:
            model = Ridge(alpha=n * (L2_LINEAR if self.l2 is None else self.l2))
        rng, q = check_random_state(random_state), validation.SCHEMES[self.scheme] if self._fitted.takes_scheme else 1.0
        with progress_bar("refits", self.verbose) as progress:
            return audit_regression(
                self._fitted, model, X, n_pairs, max_refits, q, self.confidence_level, rng, progress
            )

    @property
    def guarantee_(self) -> Guarantee:
        check_is_fitted(self)
        return APPROXIMATE.because(self._caveat) if self._caveat else self._fitted.guarantee

    def notes(self) -> list[str]:
        return [f"The promise of these intervals: {self.guarantee_}."]

    @property
    def display_name(self) -> str:
        return f"full CP ({self.method_}, {self.scheme})" if self._fitted.takes_scheme else f"full CP ({self.method_})"

    # Saved ------------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise unless a loaded regressor is complete, consistent, and gives intervals of the objects it kept."""
        self._check()
        fitted = self._fitted
        require(isinstance(fitted, FittedRegression) and fitted.method == self.method_, "method")
        require(isinstance(self._target, Target) and self.n_samples_fit_ == fitted.n, "points")
        self.verify_categories(fitted.n)
        self.verify_sample()
        self._verify_transformers()
        self.verify_intervals(fitted.quick, **({"sample_weight": 1.0} if fitted.weighs_candidates else {}))
