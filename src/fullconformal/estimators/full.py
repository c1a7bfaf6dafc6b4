"""Full conformal prediction as a scikit-learn classifier."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted
from torch import nn

from fullconformal import pvalues
from fullconformal.diagnostics import Diagnostics, Figures
from fullconformal.estimators import validation
from fullconformal.estimators.base import ABSENT, ConformalClassifier, whole_or_nothing
from fullconformal.estimators.categories import Categories, cell_sizes, warn_unreachable
from fullconformal.estimators.engine import FullConformal
from fullconformal.estimators.inputs import encode_labels, first_rows
from fullconformal.guarantees import APPROXIMATE, EXACT, Guarantee
from fullconformal.last_layer.network import Stream, is_stream
from fullconformal.losses import LOSSES
from fullconformal.methods.audit import Audit, audit_fitted
from fullconformal.methods.base import Bag, Fitted, Query, Recalibration, Unsuitable, by_category, refined
from fullconformal.methods.refit import Refit
from fullconformal.methods.select import select
from fullconformal.methods.transformed import FittedInBag
from fullconformal.models.adapters import is_skorch
from fullconformal.models.requirements import split_pipeline
from fullconformal.models.transformers import learn_from_labels, needs_labels
from fullconformal.runtime.hashing import uniforms
from fullconformal.runtime.tasks import progress_bar
from fullconformal.storage import LIMITS, require, savable


@savable
class FullConformalClassifier(FullConformal, ConformalClassifier):
    """Prediction sets by full conformal prediction from one fit: every labelled point trains and calibrates.

    Parameters
    ----------
    estimator : None, nn.Module, scikit-learn classifier, skorch net, or Pipeline ending in one, default=None
        The classifier. None is a multinomial logistic regression. A module maps a batch to logits. Of scikit-learn's,
        any with predict_proba. The C and fit_intercept of a LogisticRegression with an L2 penalty are read, and the same objective
        is minimised here.
    method : {"auto", "influence", "symmetric", "exact", "oob", "folds"} or Method, default="auto"
        "influence" is the paper's approximation, for every model with gradients. "symmetric" is exactly valid, for convex models:
        logistic regressions, and networks with `head`. "exact" is full CP itself: by fast solvers for logistic regressions, by
        updates for k-NN, kernel densities, LDA and Gaussian naive Bayes, by honest refits for anything else. "oob" scores a point by
        the trees of a forest (RandomForestClassifier, ExtraTreesClassifier with bootstrap=True, BaggingClassifier) that did not draw it:
        one fit, of as many trees as it takes for `n_estimators`, at most a hundred, to score each point; coverage measured and not proved.
        "folds" trains any classifier without each of `folds` folds and scores every point by the
        model that has not seen it: valid up to the candidate's own effect on the other models. "auto" is exact for k-NN, kernel
        densities, LDA and Gaussian naive Bayes, symmetric where the fit is convex, oob for forests, influence for networks that came
        trained (`prefit`) and wherever an option of influence is given, else folds.
    scheme : {"deleted", "studentized", "ordinary"}, default="deleted"
        Whether a point's score is its loss without it (q = 1), half-way (q = ½), or with it (q = 0).
    approximation : {"direct", "indirect", "newton"}, default="direct"
        Of the influence on the loss; of the model evaluated at shifted parameters; by a Newton step with updated curvature.
    curvature : str or Curvature, default="auto"
        The matrix 𝓗: "hessian"; "ggn", the Gauss–Newton matrix, for linear models the Hessian; "dual", the same without writing it out,
        for n·C < p. "ekfac" and "kfac" approximate what lies within Linear and Conv2d layers of any size, "last_layer" is the GGN of the
        last linear layer; what they leave out is held fixed. "last_layer_kron" approximates that by a Kronecker product: millions of
        points and thousands of classes, from one pass. "auto" is the GGN where it fits memory_budget and ten minutes, else "dual" where
        that does, else "ekfac", else "last_layer"; `diagnose` shows the choice and the estimates.
    damping : float, optional
        Added to the mean-form curvature. By default 0 where the factorisation succeeds, else the smallest that works.
    l2 : float, optional
        λ of (1/n)Σℓ + (λ/2)|θ|², for the built-in logistic regression (default 1e-3, intercept free) and modules (default 1e-2, all
        parameters). scikit-learn and skorch estimators bring their own.
    loss : "softmax" or Loss, default="softmax"
        What a module is trained by and scored with; other classifiers bring their own.
    prefit : bool, default=False
        Take the estimator as it is; `fit` is then given the data it was trained on. Symmetric and exact scores are of fits to the data with
        each candidate: a LogisticRegression trained on other data is fitted again, with a warning, and `predict` is of that fit.
    head : str, optional
        Name of a network's last linear layer, or "auto" to find it. All before it is frozen and the head refitted as a logistic
        regression. Exactly valid where the rest was not trained on the data given to `fit` (a pretrained backbone, with
        ``prefit=True``); where it was, only approximately. The rest computes in float64, at about twice the cost, if its layers allow it:
        in float32 the features of an object would depend on its batch, and ties would be lost.
    transformers : {"bag", "fixed"}, default="bag"
        How the transformers of a Pipeline are fitted: "bag" fits them anew with each object to predict (with each of its labels where
        they look at labels), which an exact guarantee asks for; "fixed" once, to the training objects: faster, and approximate.
        What learns nothing and a FrozenEstimator (fitted to other data) stay as they are; so do all with "influence", "oob" and
        ``prefit=True``, and the guarantee is then approximate. Where a transformer looks at labels, "auto" takes folds for a forest.
    confidence_level : float, default=0.9
        Of the sets, where `predict_set` is not told otherwise.
    class_conditional : bool, default=False
        Compare a candidate with the training points of its own label only: the guarantee then holds for each class.
    categories : str, int or callable, optional
        Compare an object with the training points of its own (Mondrian) category only: the guarantee then holds in each category, and with
        ``class_conditional`` for each class in each. A column of X, by its name or number, or a function that is given X as you give it
        and returns a word or number for each object, of which it looks at each by itself. The model still sees every column. An object
        of a category without training points has p-values of 1. (Points that belong together are another matter: `fit`'s ``groups``.)
    prune : {"auto", True, False}, default="auto"
        Skip products whose outcome is certain; p-values are the same. "auto" and True do so wherever the curvature is positive
        definite; False forms all of them.
    folds, repeats : int, default=10 and 1
        Of ``method="folds"``: folds, drawn at random, and how often they are drawn; ``folds * repeats`` models are trained. Several
        repeats score a point by its mean probabilities, which makes sets steadier.
    update : {"none", "influence"}, default="none"
        Of ``method="folds"``: whether a candidate is added, by one step of influence, to the models that would have seen it. For
        modules, with one repeat.
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
        Seeds training and the smoothing of p-values. A module's initial weights are yours: call ``torch.manual_seed`` before you build it.
    verbose : int or None, default=None
        1 shows progress bars, and the choice of the curvature; 0 nothing. None shows progress, and how long it will take, where that is
        more than about ten seconds: as a bar on a terminal and in a notebook, as one line on standard error elsewhere.

    Attributes
    ----------
    classes_ : ndarray (C,)
    n_samples_fit_ : int
        Number of points learnt from.
    method_ : str
        The method that was taken.
    method_reason_ : str
        Why it was taken.
    transformer_ : Pipeline or None
        The transformers of a Pipeline, fitted to the training objects; `predict` and `predict_proba` use them.

    Notes
    -----
    ``scheme``, ``class_conditional``, ``confidence_level`` and, with influence, ``approximation`` and ``prune`` may be changed by
    `set_params` after `fit`; other parameters are read when fitting.

    A transformer that looks at labels only where it is given some, and has no tag that says so, is given none with ``transformers="bag"``.

    With ``method="folds"`` the transformers of a Pipeline are part of each model, and fitted to what trains it.

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

    _fitted: Fitted
    _recalibration: Recalibration | None

    def __init__(
        self, estimator: Any = None, *, method: Any = "auto", scheme: str = "deleted", approximation: str = "direct",
        curvature: Any = "auto", damping: float | None = None, l2: float | None = None, loss: Any = "softmax",
        prefit: bool = False, head: str | None = None, transformers: str = "bag", confidence_level: float = 0.9,
        class_conditional: bool = False, categories: Any = None, prune: bool | str = "auto", folds: int = 10, repeats: int = 1,
        update: str = "none", max_epochs: int = 200, device: str = "auto", dtype: str = "auto", memory_budget: float = 4.0,
        n_jobs: int | None = None, checkpoint: Any = None, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    # Fitting ----------------------------------------------------------------------------------------------------------

    @whole_or_nothing
    def fit(
        self, X: Any, y: Any = None, classes: Any = None, *, groups: Any = None, sample_weight: Any = None
    ) -> FullConformalClassifier:
        """Fit the model to all of (X, y) and prepare what every prediction needs.

        Parameters
        ----------
        X : array-like (n, ...)
            Objects; an array, DataFrame or tensor. With ``prefit=True``, those the model was trained on. With ``prefit=True`` and a
            curvature of the last layer also a memory-mapped array, which is read batch by batch, or a
            ``torch.utils.data.Dataset`` or ``DataLoader`` of pairs (object, label), read once, in any order.
        y : array-like (n,)
            Labels; None where X yields them, which must then be the indices of the network's outputs.
        classes : array-like (C,), optional
            Every class there is, where y may lack some, as in scikit-learn's ``partial_fit``. A label without a training point counts as
            stranger than all points: p = 1/(n + 1), or 1 where ``class_conditional`` leaves it nothing to be compared with. Networks with
            an output for every class, and refits, score such labels themselves.
        groups : array-like (n,), optional
            Which points belong together (rows of a patient, say); with ``method="folds"`` they share a fold. An object to predict
            is taken to be of a group of its own.
        sample_weight : array-like (n,), optional
            Weights of points in training, given to the `fit` of the estimator, with ``method="folds"`` (the default then);
            p-values count every point alike. The guarantee asks that a weight comes with its point, as a function of it does.
        """
        try:
            return self._fit(X, y, classes, groups, sample_weight, self.method)
        except Unsuitable as error:
            if self.method != "auto":
                raise
            # Its first words say why.
            return self._fit(X, y, classes, groups, sample_weight, "folds", str(error).split(":")[0])

    def _fit(
        self, X: Any, y: Any, classes: Any, groups: Any, weights: Any, asked: Any, reason: str = ""
    ) -> FullConformalClassifier:
        """The same by the method asked for, for a reason other than the model's."""
        validation.check_full(self)
        transformers, final = split_pipeline(self.estimator)
        config = self._config(LOSSES[self.loss] if isinstance(self.loss, str) else self.loss)
        streamed = is_stream(X)
        self._categories = None if streamed else Categories.of(self.categories, X)
        if streamed:
            validation.check_stream(self, y, classes, groups, weights)
            bag = Bag(Stream(X), np.empty(0, np.int64), np.empty(0))
        else:
            X, y = self._checked(X, y, reset=True)
            found, index = encode_labels(y)
            self._sample, weights = first_rows(X), validation.check_sample_weight(self, weights, X)
        if weights is not None and asked == "auto":
            asked = "folds"
        whole = learn_from_labels(transformers) if self.transformers == "bag" else ""
        selection = select(final, asked, config, bag.X if streamed else X, whole)
        method = selection.method
        validation.check_takes_weights(method, weights)
        if not streamed:
            outputs = (isinstance(final, nn.Module) and self.head is None) or is_skorch(final)
            known, place = self._declare(found, classes, outputs or isinstance(method, Refit))
            bag = Bag(X, place[index], known, validation.check_groups(groups, len(index), method.name), weights)
        if self.method == "auto":
            config.work.say(f"method {method.name}: {reason or selection.reason}")
        if method.takes_pipeline:
            method, transformers = replace(method, model=self.estimator), None
        learns = y if transformers is None or self.transformers == "fixed" or needs_labels(transformers) else None
        self._fit_method(method, transformers, bag, learns, config, FittedInBag, reason or selection.reason)
        self._recalibration = None
        if streamed:
            self.classes_ = np.arange(self._fitted.n_classes)
        self._warn(stacklevel=5)
        self.warn_unreachable(np.asarray(self.confidence_level), stacklevel=5)
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
        validation.check_flag("smoothing", smoothing)
        given, X = X, self._prepare_inputs(X)
        validation.check_scores(self)
        points, own = validation.check_weights(weights, self._fitted.n, _num_samples(X))
        if weights is not None and self._recalibration is not None:
            raise ValueError("p-values were recalibrated without weights; leave weights out, or call fit again.")
        if bounds and (self.method_ != "symmetric" or smoothing or self._recalibration is not None):
            raise ValueError("bounds=True needs method='symmetric', without smoothing and without recalibration.")
        # Of objects as they were given: what transformers make of one differs in its last bits from batch to batch.
        seed = int(check_random_state(self.random_state).randint(2**31)) if smoothing else 0
        uniform = uniforms(self._checked(given, reset=False), seed)[:, None] if smoothing else None
        fitted, fresh = self._fitted, self._recalibration
        with progress_bar("p-values", self.verbose) as progress:
            query = self._query(given, points=points, progress=progress)
            if bounds:
                p = by_category(lambda *asked: np.stack(fitted.bounds(*asked)), X, query, own)
            elif fresh is not None:
                p = by_category(partial(fresh.p_values, fitted), X, query, uniform)
            else:
                p = by_category(fitted.p_values, X, query, own, uniform)
        if self._known is None:
            return tuple(p) if bounds else p
        # Of labels without a training point: none is above them.
        sizes = pvalues.totals(self._sizes(points), query.places).sum(1, keepdims=True)
        rest = pvalues.p_values(0.0, 0.0, 0.0 if self.class_conditional else sizes, own, uniform)
        return tuple(self._widened(part, rest) for part in p) if bounds else self._widened(p, rest)

    def _decided(self, X: Any, levels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if self._recalibration is not None:
            return self.predict_epsilon(X)
        given, X = X, self._prepare_inputs(X)
        validation.check_scores(self)
        with progress_bar("sets", self.verbose) as progress:
            query = self._query(given, progress=progress)
            return by_category(partial(self._fitted.decide, levels=levels), X, query)

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the fitted model; they carry no guarantee."""
        X = self._prepare_inputs(X)
        return self._widened(np.exp(self._fitted.log_proba(X)), 0.0)

    def _query(self, X: Any = None, **asked: Any) -> Query:
        """What is asked about objects X, as they were given, by the parameters as they are now."""
        q, kept = validation.SCHEMES[self.scheme], self._categories
        return Query(
            q, self.approximation, self.prune, class_conditional=self.class_conditional, work=self._work(),
            categories=None if kept is None else kept.points, places=None if X is None else self._places(X), **asked,
        )  # fmt: skip

    # Trust ------------------------------------------------------------------------------------------------------------

    def diagnose(self) -> Diagnostics | Figures:
        """What to know before trusting the approximation; prints as a table."""
        check_is_fitted(self)
        found = self._fitted.diagnostics
        if found is None:
            facts = {"method": f"{self.method_}: {self.method_reason_}", "guarantee": str(self.guarantee_)}
            return Figures(self.n_samples_fit_, np.nan, np.nan, facts)
        return replace(found, caveat=self._caveat, guarantee=self.guarantee_.word)

    def audit(self, X: Any, n_pairs: int = 20, *, max_refits: int = 2000, random_state: Any = 0) -> Audit:
        """Compare with exact refits on pairs of an object of X and a label, and say what that implies for the error rate.

        Labels are drawn that are likely or have a p-value near the level: those on which sets depend. Networks are refitted
        from two starts.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects to draw from.
        n_pairs : int, default=20
        max_refits : int, default=2000
            Where n refits a pair are more than this allows, as many training points as it does are drawn at random.
        random_state : int, RandomState or None, default=0

        Returns
        -------
        Audit
            Prints as a table.
        """
        inputs = self._prepare_inputs(X)
        validation.check_audit(n_pairs, max_refits)
        if self.scheme == "studentized" or self._sizes().size > 1 or self._recalibration is not None:
            raise ValueError(
                "an audit compares with refits: use scheme='deleted' or 'ordinary', class_conditional=False, no categories, no "
                "recalibration."
            )
        with progress_bar("refits", self.verbose) as progress:
            asked = n_pairs, max_refits, self.confidence_level, check_random_state(random_state), progress
            return audit_fitted(self._fitted, inputs, self._query(X), *asked)

    def recalibrate(self, X: Any, y: Any) -> FullConformalClassifier:
        """Make the p-values exactly valid with fresh labelled points that were not given to `fit`.

        The p-value of a fresh point's true label is a split-conformal score: from now on `predict_p` returns
        p′ = (1 + #{p_j ≤ p})/(m + 1), where equal p-values are ordered by the model's loss (an overfitted model gives
        many labels the smallest p-value there is). The order of labels stays as it was.

        Parameters
        ----------
        X : array-like (m, ...)
            A few hundred objects.
        y : array-like (m,)
            Their labels.
        """
        check_is_fitted(self)
        validation.check_scores(self)
        known = self.classes_ if self._known is None else self.classes_[self._known]
        index = validation.check_fresh(X, y, known)
        with progress_bar("p-values", self.verbose) as progress:
            query = self._query(X, progress=progress)
            p = by_category(partial(refined, self._fitted), self._prepare_inputs(X), query)
        cell = pvalues.cells(index, self._width, query.places)
        n_cells = cell_sizes(self._fitted.labels, self._width, self._categories).size
        self._recalibration = Recalibration.of(p[np.arange(len(index)), index], cell, n_cells, query)
        return self

    def warn_unreachable(self, levels: npt.NDArray[np.float64], stacklevel: int = 3) -> None:
        """Warn where a confidence level needs more training (after `recalibrate`: fresh) points than there are."""
        sizes, kind = self._sizes(), "training" if self._recalibration is None else "fresh"
        sizes = self._widened(sizes, 0.0) if self._known is not None and self._width > 1 else sizes
        warn_unreachable(sizes, self.classes_, self._categories, levels, kind, stacklevel)

    @property
    def _width(self) -> int:
        """Cells of a category, in which points are compared: C where that is for each class, else one."""
        return self._fitted.n_classes if self.class_conditional else 1

    def _sizes(self, points: Any = None) -> npt.NDArray[Any]:
        """Number, or weight, of the points that candidates are compared with, (G, width): in each cell of each category."""
        if self._recalibration is not None:
            return self._recalibration.sizes.reshape(-1, self._width)
        return cell_sizes(self._fitted.labels, self._width, self._categories, points)

    @property
    def guarantee_(self) -> Guarantee:
        check_is_fitted(self)
        if self._recalibration is not None:
            return EXACT.because("recalibrated with fresh points")
        promise = self._fitted.guarantee
        absent = promise.is_exact and self._known is not None and not self.class_conditional
        if lacks := self._caveat or ABSENT * absent:
            return APPROXIMATE.because(lacks)
        other = promise.is_exact and self.prefit and self.head is not None
        return promise.because("provided that all before the head was trained on other data") if other else promise

    @property
    def display_name(self) -> str:
        return f"full CP ({self.method_}, {self.scheme})"

    # Saved ------------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise unless a loaded classifier is complete, consistent, and gives p-values of the objects it kept."""
        validation.check_full(self)
        n_classes, fitted = self.verify_labels(), self._fitted
        require(isinstance(fitted, Fitted) and fitted.method == self.method_, "method")
        labels, known = fitted.labels, self.verify_known(n_classes)
        require(labels.dtype == np.int64 and bool(((labels >= 0) & (labels < known)).all()), "labels")
        require(fitted.n_classes == known, "classes")
        # A number for each point and label, which few points and labels do not bear out.
        plain = self._width == 1 and self._categories is None and fitted.method in ("folds", "oob")
        most = max(LIMITS.budget // 32, LIMITS.activations(fitted.n))
        require(plain or fitted.method == "influence" or fitted.n * known <= most, "number of classes")
        n_cells = self.verify_categories(fitted.n) * self._width
        if self._recalibration is not None:
            self._recalibration.verify(n_cells)
        # A stream kept no object: it is tried on one of zeros.
        if not hasattr(self, "_sample"):
            require(self._input_shape == fitted.input_shape, "shape of objects")
            self._sample = np.zeros((1, *self._input_shape))
        self.verify_sample()
        self._verify_transformers()
        proba = self.predict_proba(self._sample)
        require(proba.shape[1:] == (n_classes,) and bool(np.isfinite(proba).all()), "model")
        if fitted.quick and (plain or fitted.n * known <= 2**22):
            self.verify_p()
