"""Bad input gets an error that names the argument and what to do, before anything is trained."""

import copy
import warnings
from functools import partial

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from cases import bad_data
from sklearn.compose import make_column_transformer
from sklearn.ensemble import AdaBoostClassifier, HistGradientBoostingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from torch import nn

from fullconformal import (
    ConformalWarning,
    CVPlusClassifier,
    FullConformalClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
    compare,
    metrics,
)
from fullconformal.curvature import GGN, CurvatureError
from fullconformal.diagnostics import Diagnostics
from fullconformal.losses.base import NotFinite
from fullconformal.models import mlp
from fullconformal.storage import StorageError

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)), np.arange(40) % 3


class Explodes(nn.Module):
    """A module that must not be trained: bad input is found first."""

    def __init__(self, outputs=3):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, outputs), 0

    def forward(self, x):
        if x.requires_grad or torch.is_grad_enabled():
            raise AssertionError("training began")
        return self.layer(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "method='magic' is unknown; allowed: 'auto'"),
        ({"scheme": "both"}, "scheme='both' is unknown; allowed: 'ordinary', 'studentized', 'deleted'"),
        ({"approximation": 3}, "approximation=3 is unknown"),
        ({"curvature": "kfoc"}, "curvature='kfoc' is unknown"),
        ({"damping": -1}, "damping=-1"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"damping": 0.1, "curvature": GGN()}, "damping was given twice"),
        ({"l2": -1.0}, "l2=-1.0"),
        ({"confidence_level": 1.0}, "confidence_level"),
        ({"confidence_level": 95}, "confidence_level"),
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"prune": "yes"}, "prune='yes'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"device": "quantum"}, "device='quantum'"),
        ({"device": "meta"}, "device='meta' cannot be used here"),
        ({"prefit": "no"}, "prefit='no' is not allowed; give True or False"),
        ({"class_conditional": "no"}, "class_conditional='no' is not allowed"),
        ({"n_jobs": "two"}, "n_jobs='two' is not allowed; give None, a whole number ≥ 1, or -1"),
        ({"n_jobs": 0}, "n_jobs=0 is not allowed"),
        ({"n_jobs": 1.5}, "n_jobs=1.5 is not allowed"),
        ({"checkpoint": 3}, "checkpoint=3 is not allowed; give None or the path of a folder"),
        ({"verbose": "no"}, "verbose='no' is not allowed; give None, 0 or 1"),
        ({"max_epochs": 1.5}, "max_epochs=1.5 is not allowed; give a whole number"),
        ({"max_epochs": -1}, "max_epochs=-1 is not allowed"),
        ({"prefit": True}, "prefit=True needs a fitted estimator"),
        ({"estimator": nn.ReLU()}, "no trainable parameters"),
        (
            {"estimator": nn.Sequential(nn.Linear(4, 3), nn.Dropout())},
            r"Dropout in training mode.*call estimator.eval\(\)",
        ),
        ({"estimator": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, "BatchNorm1d in training mode"),
        ({"estimator": Explodes(5)}, r"logits of shape \(batch, 3\)"),
        ({"estimator": nn.Linear(7, 3)}, "estimator does not take X of shape"),
        ({"estimator": nn.Embedding(9, 3)}, r"in float\d+ \(of codes, an Embedding takes x.long\(\)\): .* Long"),
        ({"estimator": LogisticRegression(class_weight="balanced"), "method": "symmetric"}, "class_weight='balanced'"),
        ({"estimator": LogisticRegression(l1_ratio=1.0, solver="saga"), "method": "symmetric"}, "L1 penalty"),
        ({"estimator": LogisticRegression(solver="liblinear"), "method": "symmetric"}, "penalises the intercept"),
        ({"estimator": LogisticRegression(), "l2": 0.1}, "brings its own penalty"),
        ({"estimator": LogisticRegression(), "prefit": True}, "is not fitted"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FullConformalClassifier(**options).fit(X, Y)


@pytest.mark.parametrize("make", [SplitConformalClassifier, CVPlusClassifier, JackknifePlusClassifier])
@pytest.mark.parametrize(
    "options",
    [
        *({name: "no"} for name in ("randomized", "class_conditional", "prefit", "allow_empty", "verbose", "n_jobs")),
        {"max_epochs": 1.5},
    ],
)
def test_bad_options_of_the_alternatives(make, options):
    (name,) = options
    if name in make._get_param_names():
        with pytest.raises(ValueError, match=f"{name}={options[name]!r} is not allowed; give"):
            make(**options).fit(X, Y)
    else:
        with pytest.raises(TypeError, match=name):
            make(**options)


@pytest.mark.parametrize("options", [{"verbose": True}, {"verbose": np.int64(0)}, {"n_jobs": np.int64(1)}])
def test_options_that_are_numbers_of_another_kind(options):
    FullConformalClassifier(**options).fit(X, Y)
    CVPlusClassifier(**options).fit(X, Y)


def test_no_epochs_leave_the_fit_to_the_polish():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    clf = FullConformalClassifier(net, method="influence", max_epochs=0).fit(X, Y)
    assert clf.diagnose().gradient <= 1e-5 * len(Y)  # of the sum, where L-BFGS stops at 1e-5 of the mean


def test_models_without_gradients_are_told_of_other_methods():
    with pytest.raises(
        TypeError,
        match=r"HistGradientBoostingClassifier cannot be wrapped.*method='auto' or 'folds'.*'exact', by a refit",
    ):
        FullConformalClassifier(HistGradientBoostingClassifier(), method="influence").fit(X, Y)


@pytest.mark.parametrize("estimator", [None, Explodes()])
@pytest.mark.parametrize(("data", "labels", "message"), bad_data(X, Y))
def test_bad_data(estimator, data, labels, message):
    with pytest.raises(ValueError, match=message):
        FullConformalClassifier(estimator).fit(data, labels)


@pytest.mark.parametrize(
    ("data", "message"),
    [(X[:, :3], "3 features"), (X[:0], "0 sample"), (np.full((2, 4), np.nan), "NaN"), (X[0], "1D|1-D|one-dim|2D")],
)
def test_bad_objects(data, message):
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    with pytest.raises(ValueError, match=message):
        clf.predict_p(data)


def test_not_fitted():
    with pytest.raises(NotFittedError):
        FullConformalClassifier().predict_p(X)
    with pytest.raises(NotFittedError):
        FullConformalClassifier().diagnose()


@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1, "high", [0.9, 1.0], []])
def test_bad_levels_are_found_before_predicting(level):
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    with pytest.raises(ValueError, match="confidence_level"):
        clf.predict_set(X, level)


def test_bad_weights():
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    for weights in (np.ones(40), (np.ones(3), np.ones(2)), (np.ones(40), -np.ones(2)), (np.zeros(40), np.ones(2))):
        with pytest.raises(ValueError, match="weights"):
            clf.predict_p(X[:2], weights=weights)


def test_a_curvature_that_does_not_fit_is_refused_before_training():
    net = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3))
    with pytest.raises(
        MemoryError, match=r"'ggn' of 24,003 parameters needs about 13 GiB, memory_budget is 4 GiB.*last_layer: 1.8 GiB"
    ):
        FullConformalClassifier(net, max_epochs=10**9, curvature="ggn").fit(X, Y)
    # 24 bytes an entry (float32): √(2³⁰/24) = 6,688.
    with pytest.raises(MemoryError, match=r"memory_budget is 1 GiB.*freeze layers .*6,688 trainable parameters"):
        FullConformalClassifier(net, max_epochs=10**9, memory_budget=1.0, curvature="hessian").fit(X, Y)
    with pytest.raises(
        MemoryError, match=r"'auto': no curvature .*ggn: .*dual: .*ekfac: .*last_layer: .*raise memory_budget"
    ):
        FullConformalClassifier(net, method="influence", max_epochs=10**9, memory_budget=1e-3).fit(X, Y)


def test_losses_that_are_not_finite():
    net = mlp(4, (5,), 3)
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="not finite"):
        FullConformalClassifier(net).fit(X, Y)
    with pytest.raises((NotFinite, CurvatureError), match="not finite"):
        FullConformalClassifier(mlp(4, (5,), 3), max_epochs=20).fit(X * 1e30, Y)


def test_labels_unseen_in_training_are_named_by_metrics():
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    with pytest.warns(UserWarning, match=r"y holds labels that are not among the classes: \[7\]"):
        metrics.coverage(clf.predict_set(X[:2]), [0, 7], clf.classes_)


def test_split_checks_its_share():
    with pytest.raises(ValueError, match="calibration_size"):
        SplitConformalClassifier(calibration_size=1.0).fit(X, Y)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([None, *"ab" * 19, "c"], dtype=object),
        np.array([np.nan, *"ab" * 19, "c"], dtype=object),
        np.r_[np.nan, Y[1:]],
        pd.Series([pd.NA, *"ab" * 19, "c"], dtype="string"),
        pd.Series([None, *Y[1:]], dtype="Int64"),
        np.array(["NaT", *["2020-01-01", "2021-01-01"] * 19, "2020-01-01"], dtype="datetime64[D]"),
    ],
)
@pytest.mark.parametrize("estimator", [None, make_pipeline(StandardScaler(), LogisticRegression())])
def test_missing_labels_are_counted_and_located(labels, estimator):
    with pytest.raises(ValueError, match=r"y has no label at 1 of its 40 places, the first at 0 \(counted from 0\)"):
        FullConformalClassifier(estimator).fit(X, labels)


KINDS = [
    *((pd.Series(Y, dtype=name), [0, 1, 2], kind) for name, kind in (("Int64", "i"), ("UInt8", "u"))),
    (pd.Series(Y).astype("int64[pyarrow]"), [0, 1, 2], "i"),
    (pd.array(Y, dtype="Int64"), [0, 1, 2], "i"),
    (pd.DataFrame({"label": pd.array(Y, dtype="Int64")}), [0, 1, 2], "i"),
    (pd.Series(Y % 2 == 1, dtype="boolean"), [False, True], "b"),
    (pd.Series(list("abc"))[Y].astype("string"), ["a", "b", "c"], "O"),
    (np.array(Y.tolist(), dtype=object), [0, 1, 2], "i"),
    (np.array((Y % 2 == 1).tolist(), dtype=object), [False, True], "b"),
    (np.ma.masked_array(Y), [0, 1, 2], "i"),  # nothing is masked
]


@pytest.mark.parametrize(("labels", "classes", "kind"), KINDS)
@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
@pytest.mark.parametrize("estimator", [None, make_pipeline(StandardScaler(), LogisticRegression())])
def test_labels_keep_their_kind(make, estimator, labels, classes, kind):
    clf = make(estimator, random_state=0).fit(X, labels)
    assert clf.classes_.dtype.kind == kind
    assert [(type(label), label) for label in clf.classes_.tolist()] == [(type(label), label) for label in classes]
    if make is FullConformalClassifier:
        assert clf.recalibrate(X[:8], labels[:8]).predict_p(X[:2]).shape == (2, len(classes))
    if estimator is None:
        assert compare([make(random_state=0)], X, labels, X, labels).classes.tolist() == classes


@pytest.mark.parametrize("estimator", [None, make_pipeline(StandardScaler(), LogisticRegression()), nn.Linear(4, 3)])
def test_masked_values_are_not_taken_for_values(estimator):
    hidden = np.ma.masked_array(X, mask=np.arange(160).reshape(40, 4) % 40 == 0)
    with pytest.raises(ValueError, match="X is a masked array with 4 of its 160 values masked; impute them"):
        FullConformalClassifier(estimator).fit(hidden, Y)
    with pytest.raises(ValueError, match="y is a masked array with 1 of its 40 values masked; leave such points out"):
        FullConformalClassifier(estimator).fit(X, np.ma.masked_array(Y, mask=Y * 0 + (np.arange(40) == 7)))
    clf = FullConformalClassifier(estimator, max_epochs=1).fit(X, Y)
    with pytest.raises(ValueError, match="X is a masked array"):
        clf.predict_p(hidden)


def test_bytes_are_no_labels():
    with pytest.raises(ValueError, match=r"y holds bytes; give strings, for instance y.astype\(str\)"):
        FullConformalClassifier().fit(X, np.array([b"a", b"b"])[Y % 2])


@pytest.mark.parametrize("kind", [FullConformalClassifier, SplitConformalClassifier])
def test_columns_of_words_are_named(kind):
    table = pd.DataFrame(X, columns=list("abcd")).assign(metal=pd.Categorical(["Cu", "Zn"] * 20), note="text")
    with pytest.raises(ValueError, match=r"X has columns that are not numbers: 'metal', 'note'\. .*OneHotEncoder"):
        kind().fit(table, Y)


def test_categories_that_are_numbers_are_numbers():
    table = pd.DataFrame(X, columns=list("abcd"))
    codes = pd.Series(np.arange(40) % 2)
    p = [
        FullConformalClassifier().fit(table.assign(e=column), Y).predict_p(table.assign(e=column)[:5])
        for column in (codes, codes.astype("category"))
    ]
    assert np.array_equal(p[0], p[1])


@pytest.mark.parametrize("dtype", [">f8", ">f4", np.longdouble])
@pytest.mark.parametrize("estimator", [None, KNeighborsClassifier(3)])
def test_numbers_as_other_machines_write_them(dtype, estimator):
    clf = FullConformalClassifier(estimator).fit(X.astype("f4"), Y)
    odd = FullConformalClassifier(estimator).fit(X.astype("f4").astype(dtype), Y)
    assert np.array_equal(clf.predict_p(X[:5].astype("f4")), odd.predict_p(X[:5].astype("f4").astype(dtype)))


@pytest.mark.parametrize("method", ["symmetric", "exact"])
@pytest.mark.parametrize("value", [1e20, 1e200])
def test_objects_far_away_have_every_label_are_named_and_leave_the_others_alone(method, value):
    clf = FullConformalClassifier(method=method).fit(X, Y)
    far = X[:9].copy()
    far[[3, 7], 2] = value, -value
    message = rf"2 of 9 objects are one.*\(objects 3, 7, counted from 0\).*object 3 .*lies too far.*feature 2 .* is {value:.3g}"
    with pytest.warns(UserWarning, match=message.replace("+", r"\+")):
        p = clf.predict_p(far)
    assert (p[[3, 7]] == 1).all()
    others = [0, 1, 2, 4, 5, 6, 8]
    assert np.array_equal(p[others], clf.predict_p(X[others]))
    with pytest.warns(UserWarning, match="hold every label"):
        assert clf.predict_set(far[[3]]).all()


@pytest.mark.parametrize("approximation", ["direct", "indirect", "newton"])
@pytest.mark.parametrize("scheme", ["ordinary", "deleted"])
def test_an_object_whose_scores_overflow_is_named(approximation, scheme):
    clf = FullConformalClassifier(method="influence", approximation=approximation, scheme=scheme).fit(X, Y)
    far = X[:3].copy()
    far[1, 2] = 1e200
    with pytest.raises(ValueError, match=r"object 1 of those.*up to 1e\+200 in size, and its scores overflow float64"):
        clf.predict_p(far)
    far[1, 2] = 1e20  # is wild, and can be computed with
    assert np.isfinite(clf.predict_p(far)).all()


@pytest.mark.parametrize("curvature", ["ggn", "ekfac", "last_layer", "last_layer_kron"])
@pytest.mark.parametrize("scheme", ["ordinary", "deleted"])
def test_an_object_too_large_for_single_precision_is_named(curvature, scheme):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    clf = FullConformalClassifier(net, prefit=True, curvature=curvature, scheme=scheme).fit(X.astype("f4"), Y)
    far = X[:3].copy()
    for value in (1e200,) if curvature == "last_layer_kron" else (1e25, 1e200):
        far[1, 2] = value
        with pytest.raises(ValueError, match=r"object 1\b"):
            clf.predict_p(far)
    with pytest.raises(ValueError, match=r"object 1\b"):
        clf.predict_proba(far)


@pytest.mark.parametrize("labels", [Y % 2, Y])
@pytest.mark.parametrize(
    ("make", "estimator"),
    [
        *((FullConformalClassifier, model) for model in (None, LogisticRegression(), mlp(4, (5,), 3))),
        *(
            (SplitConformalClassifier, model) for model in (None, mlp(4, (5,), 3))
        ),  # scikit-learn's fit has its own words
        *((JackknifePlusClassifier, model) for model in (None, LogisticRegression())),
    ],
)
def test_a_training_value_too_large_to_square_is_named(make, estimator, labels):
    wild = X.copy()
    wild[:, 2] = -1e200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            ValueError, match=r"X holds -1e\+200 in column 2 \(counted from 0\), too large for .*wrong unit"
        ):
            make(estimator).fit(wild, labels)
        if estimator is None and make is FullConformalClassifier:
            with pytest.raises(ValueError, match=r"X holds -1e\+200 in column 2"):
                make(method="influence").fit(wild, labels)


def test_what_a_pipeline_spoils_is_located():
    scaled, wild, holes = make_pipeline(StandardScaler(), LogisticRegression()), X.copy(), X.copy()
    wild[:, 2], holes[3, 1] = 1e200, np.nan
    with (
        np.errstate(all="ignore"),
        pytest.raises(ValueError, match=r"X holds NaN or infinity once .* object 0, column 2 \("),
    ):
        FullConformalClassifier(scaled).fit(wild + X, Y)
    with pytest.raises(ValueError, match=r"X holds NaN or infinity once .* object 3, column 1 .*impute missing values"):
        FullConformalClassifier(scaled).fit(holes, Y)


@pytest.mark.parametrize("value", [1e12, 1e100])
def test_a_wild_training_value_is_blamed_before_separation(value):
    wild = X.copy()
    wild[7, 2] = value
    message = rf"feature 2 .* is {value:.3g} at training point 7, while half its values".replace("+", r"\+")
    with pytest.raises(ValueError, match=message):
        FullConformalClassifier().fit(wild, Y)
    # What is far from zero altogether, as dates in seconds are, is not wild.
    moved = FullConformalClassifier().fit(X + 1e10, Y)
    assert np.array_equal(
        moved.predict_p(X[:5] + 1e10),
        FullConformalClassifier().fit((X + 1e10) - 1e10, Y).predict_p(X[:5] + 1e10 - 1e10),
    )


@pytest.mark.parametrize("C", [None, "1", -1.0])
@pytest.mark.parametrize("prefit", [False, True])
def test_odd_options_of_logistic_regression_are_named(C, prefit):
    model = LogisticRegression().fit(X, Y).set_params(C=C)
    with pytest.raises(ValueError, match="The 'C' parameter of LogisticRegression must be"):
        FullConformalClassifier(model, prefit=prefit).fit(X, Y)


@pytest.mark.filterwarnings("ignore:'penalty' was deprecated")
def test_an_elastic_net_without_l1_is_an_l2_penalty():
    p = [
        FullConformalClassifier(model).fit(X, Y).predict_p(X[:5])
        for model in (LogisticRegression(), LogisticRegression(penalty="elasticnet", l1_ratio=0.0, solver="saga"))
    ]
    assert np.array_equal(p[0], p[1])


def test_levels_out_of_reach_are_told():
    clf = FullConformalClassifier().fit(X, Y)
    with pytest.warns(ConformalWarning, match="needs more than the 40 training points there are.*1/41") as caught:
        assert clf.predict_set(X, 0.99).all()
    assert caught[0].filename == __file__
    with pytest.warns(ConformalWarning, match="13 training points of class 1"):
        clf.set_params(class_conditional=True).predict_set(X, 0.95)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf.predict_set(X, 0.9)
        clf.predict_set(X, 0.99, smoothing=True)
    with pytest.raises(NotFittedError):
        FullConformalClassifier().predict_set(X, 0.9)


def test_missing_values_reach_a_classifier_that_takes_them():
    holes = X.copy()
    holes[::7, 1] = np.nan
    model = HistGradientBoostingClassifier(max_iter=2, min_samples_leaf=3)
    clf = SplitConformalClassifier(model, random_state=0).fit(holes, Y)
    assert clf.predict_p(holes[:8]).shape == (8, 3)
    clf = FullConformalClassifier(model, method="exact", scheme="ordinary").fit(holes[:8], Y[:8])
    assert clf.predict_p(holes[7:8]).shape == (1, 3)
    with pytest.raises(ValueError, match="X holds NaN in object 0, column 1"):
        SplitConformalClassifier(LogisticRegression()).fit(holes, Y)


FORMS = {
    "array": (np.asarray, r"column 1 \(counted from 0\)"),
    "table": (lambda X: pd.DataFrame(X, columns=list("abcd")), r"column 1 \(counted from 0\), 'b'"),
    "table with NA": (lambda X: pd.DataFrame(X).astype("Float64"), r"column 1 \(counted from 0\), 1"),
    "images": (lambda X: X.reshape(-1, 2, 2), r"place 0, 1 \(counted from 0\)"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("value", "kind", "remedy"),
    [(np.nan, "NaN", "Impute missing values first"), (-np.inf, r"infinity \(-inf\)", "Look for a wrong unit")],
)
def test_values_that_are_not_finite_are_told_with_their_place(form, value, kind, remedy):
    bad, (make, where) = X.copy(), FORMS[form]
    bad[5, 1], bad[6, 0] = value, value
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) if form == "images" else LogisticRegression()
    sentence = f"X holds {kind} in object 5, {where}; 2 such values in all. {remedy}"
    with pytest.raises(ValueError, match=sentence):
        SplitConformalClassifier(model).fit(make(bad), Y)
    clf = SplitConformalClassifier(model, random_state=0).fit(make(X), Y)
    with pytest.raises(ValueError, match=sentence):
        clf.predict_p(make(bad))


@pytest.mark.parametrize("curvature", ["ggn", "hessian", "Hessian"])
def test_the_remedy_for_a_damped_curvature_is_another_one(curvature):
    figures = {"gradient": 0.0, "newton_decrement": 0.0, "largest_influence": 1.0, "smallest_eigenvalue": 1e-9}
    told = Diagnostics(
        100, 5, curvature, damping=1e-9, damping_chosen=True, positive_definite=True, largest_leverage=0.1,
        negative_scores=0, **figures,
    ).warnings  # fmt: skip
    assert "was damped by" in told[0]
    assert ("use curvature='ggn'" in told[0]) == (curvature != "ggn")


class Odd(nn.Module):
    """A linear layer, and something more."""

    def __init__(self, after):
        super().__init__()
        self.layer, self.after = nn.Linear(4, 3), after

    def forward(self, x):
        return self.after(self.layer(x))


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (
            lambda f: f.squeeze(),
            r"outputs of shape \(1, 3\) for a batch of one, but returned \(3,\); leave out squeeze",
        ),
        (lambda f: f - f.mean(0), "other numbers for an object by itself than beside another one"),
        (lambda f: f + torch.randn_like(f), "it is random, or lets objects of a batch depend on each other"),
    ],
)
@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
def test_networks_that_do_not_treat_objects_one_by_one_are_refused(make, after, message):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        make(Odd(after), max_epochs=1).fit(X, Y)


@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
@pytest.mark.parametrize("kind", [LogisticRegression, nn.Linear])
def test_a_class_is_no_classifier(make, kind):
    with pytest.raises(TypeError, match=rf"estimator={kind.__name__} is a class; give an instance"):
        make(kind).fit(X, Y)


def test_tensors_of_bfloat16_are_numbers():
    half = torch.tensor(X).bfloat16()
    p = [FullConformalClassifier().fit(part, Y).predict_p(part[:5]) for part in (half, half.double())]
    assert np.array_equal(*p)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "it").write_text("")
    with pytest.raises(ValueError, match="is a file; give the path of a folder"):
        FullConformalClassifier(checkpoint=tmp_path / "it").fit(X, Y)


@pytest.mark.parametrize("prefit", [False, True])
def test_a_network_that_returns_probabilities_is_refused(prefit):
    net = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1))
    with pytest.raises(ValueError, match=r"estimator returns probabilities.*leave out its last Softmax"):
        FullConformalClassifier(net, prefit=prefit, max_epochs=1).fit(X.astype("f4"), Y)
    logs = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))  # as good as logits
    expected = "influence" if prefit else "folds"
    assert FullConformalClassifier(logs, prefit=prefit, max_epochs=1).fit(X.astype("f4"), Y).method_ == expected


@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier, CVPlusClassifier])
def test_one_object_is_not_taken_for_several(make):
    clf = make(nn.Linear(4, 3), max_epochs=1).fit(X, Y)
    with pytest.raises(ValueError, match=r"X has objects of shape \(\), but those of fit had \(4,\)"):
        clf.predict_epsilon(X[0])


@pytest.mark.parametrize("estimator", [None, make_pipeline(StandardScaler(), LogisticRegression()), nn.Linear(4, 3)])
@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
def test_columns_of_one_name_are_told_of(make, estimator):
    with pytest.raises(ValueError, match="X has several columns of the same name: 'a'; rename or drop them"):
        make(estimator).fit(pd.DataFrame(X, columns=list("aacd")), Y)


@pytest.mark.parametrize("kind", ["M8[ns]", "m8[s]"])
def test_dates_are_no_numbers(kind):
    with pytest.raises(ValueError, match=r"X holds dates or times \(.*\); give numbers"):
        FullConformalClassifier().fit((X * 1e9).astype(kind), Y)


def test_a_word_is_no_labels():
    with pytest.raises(ValueError, match="y='target' is one word; give the labels"):
        FullConformalClassifier().fit(X, "target")


@pytest.mark.parametrize(("order", "value"), [(2, 1e160), (3, -1e110)])
def test_values_whose_distances_overflow_are_named(order, value):
    """They would count as no neighbours, and the object as nonconforming with every label."""
    model, far = KNeighborsClassifier(3, p=order), X[:3].copy()
    far[1, 2] = value
    clf = FullConformalClassifier(model).fit(X, Y)
    with pytest.raises(ValueError, match=r"in object 1, column 2 \(counted from 0\): distances overflow beyond"):
        clf.predict_p(far)
    far[1, 2] = 1e50
    assert (clf.predict_p(far)[1] > 0.5).all()  # as far from its own label as from the others
    with pytest.raises(ValueError, match=r"in column 2 \(counted from 0\): distances overflow beyond"):
        FullConformalClassifier(model).fit(np.c_[X[:, :2], np.full(40, value)], Y)


@pytest.mark.parametrize("labels", [Y % 2, Y])
@pytest.mark.parametrize(
    "make",
    [
        partial(FullConformalClassifier, method="influence"),
        SplitConformalClassifier,
        CVPlusClassifier,
        JackknifePlusClassifier,
    ],
)
def test_probabilities_that_are_no_numbers_are_told_of(make, labels):
    far = X[:3].copy()
    far[1] = 1.7e308
    clf = make(random_state=0).fit(X / 10, labels)
    with pytest.raises(ValueError, match=r"object 1 of those to be predicted"):
        clf.predict_epsilon(far)
    with pytest.raises(ValueError, match=r"probabilities of object 1 of those to be predicted .* contain NaN"):
        clf.predict_proba(far)


@pytest.mark.parametrize("labels", [Y % 2, Y])
def test_an_object_whose_bags_cannot_be_fitted_has_every_label(labels):
    """Its p-values are one, which errs upwards; those of the others are what they are without it."""
    far = X[:3].copy()
    far[1] = 1.7e308
    clf = FullConformalClassifier(random_state=0).fit(X / 10, labels)
    with pytest.warns(UserWarning, match=r"1 of 3 objects are one.*objects 1, counted from 0"):
        p = clf.predict_p(far)
    assert (p[1] == 1).all() and np.array_equal(p[[0, 2]], clf.predict_p(far[[0, 2]]))
    with pytest.raises(ValueError, match=r"probabilities of object 1 of those to be predicted .* contain NaN"):
        clf.predict_proba(far)


def test_an_object_is_named_before_it_is_one_of_a_bag():
    far = X[:3].copy()
    far[2, 1] = 1e200
    clf = FullConformalClassifier(nn.Linear(4, 3), method="exact", scheme="ordinary", max_epochs=1).fit(X, Y)
    with pytest.raises(ValueError, match=r"X holds 1e\+200 in object 2, column 1"):
        clf.predict_p(far)


def test_masked_labels_are_not_measured_with():
    sets = np.ones((3, 2), dtype=bool)
    with pytest.raises(ValueError, match="y is a masked array"):
        metrics.coverage(sets, np.ma.masked_array([0, 1, 1], mask=[0, 1, 0]))
    assert metrics.coverage(sets, np.ma.masked_array([0, 1, 1])).value == 1


def test_a_comparison_needs_objects():
    with pytest.raises(ValueError, match="X_test has no objects"):
        compare(None, X, Y, X[:0], Y[:0])


def test_words_are_no_truth_values_after_fit():
    clf = FullConformalClassifier().fit(X, Y)
    for method in (clf, SplitConformalClassifier(random_state=0).fit(X, Y)):
        with pytest.raises(ValueError, match="smoothing='no' is not allowed; give True or False"):
            method.predict_p(X, smoothing="no")
    with pytest.raises(ValueError, match="class_conditional='no' is not allowed"):
        clf.set_params(class_conditional="no").predict_p(X)
    with pytest.raises(ValueError, match=r"n_pairs=1.5 is not allowed"):
        FullConformalClassifier(method="influence").fit(X, Y).audit(X, n_pairs=1.5)


def test_a_wild_value_among_zeros_is_blamed():
    rare = (np.arange(40) % 10 == 0).astype(float)
    for column in (rare, 0 * rare):
        column[7] = 1e15
        with pytest.raises(ValueError, match=r"feature 4 .* is 1e\+15 at training point 7, while half its values"):
            FullConformalClassifier().fit(np.c_[X, column], Y)


def test_a_constant_far_from_nothing_does_not_matter():
    clf = FullConformalClassifier().fit(np.c_[X, np.full(40, 1e9)], Y)
    assert np.array_equal(
        clf.predict_p(np.c_[X[:5], np.full(5, 1e9)]), FullConformalClassifier().fit(X, Y).predict_p(X[:5])
    )


@pytest.mark.parametrize("curvature", ["auto", "last_layer_kron"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks_are_computed_with_in_float32(curvature, dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
    whole = FullConformalClassifier(copy.deepcopy(net).float(), prefit=True, curvature=curvature).fit(X.astype("f4"), Y)
    half = FullConformalClassifier(net, prefit=True, curvature=curvature).fit(X.astype("f4"), Y)
    assert np.array_equal(half.predict_p(X[:5].astype("f4")), whole.predict_p(X[:5].astype("f4")))


def test_a_backbone_that_does_not_take_x_is_told_of():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 3))
    with pytest.raises(ValueError, match=r"estimator does not take X of shape \(40, 4\)"):
        FullConformalClassifier(net, head="auto", prefit=True).fit(X, Y)


SCALED = make_pipeline(StandardScaler(), LogisticRegression())


@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
def test_one_object_given_to_a_pipeline_is_told_from_a_table(make):
    clf = make(SCALED, random_state=0).fit(X, Y)
    for one in (X[0], pd.DataFrame(X).iloc[0]):
        with pytest.raises(ValueError, match=r"X has shape \(4,\), and a matrix \(objects, 4 columns\) is meant"):
            clf.predict_p(one)
    assert clf.predict_p(X[0].reshape(1, -1)).shape == clf.predict_p(pd.DataFrame(X).iloc[[0]].to_numpy()).shape


@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
@pytest.mark.parametrize("none", [X[:0], pd.DataFrame(X)[:0], []])
def test_no_objects_for_a_pipeline(make, none):
    with pytest.raises(ValueError, match="X has no objects"):
        make(SCALED).fit(none, Y[:0])
    with pytest.raises(ValueError, match="X has no objects"):
        make(SCALED, random_state=0).fit(X, Y).predict_p(none)


def test_a_report_needs_a_fit(tmp_path):
    with pytest.raises(NotFittedError):
        FullConformalClassifier().report(X, Y, tmp_path / "it.html")


def test_other_classifiers_are_sent_to_methods_that_take_them():
    with pytest.raises(TypeError, match="Take method='auto' or 'folds', which train any classifier"):
        FullConformalClassifier(HistGradientBoostingClassifier(), method="influence").fit(X, Y)


def test_classifiers_that_files_do_not_know_have_another_way(tmp_path):
    clf = SplitConformalClassifier(AdaBoostClassifier(n_estimators=3), random_state=0).fit(X, Y)
    with pytest.raises(StorageError, match=r"AdaBoostClassifier cannot be saved: .*keep a pickle"):
        clf.save(tmp_path / "it")
    joblib.dump(clf, tmp_path / "it.joblib")
    assert np.array_equal(joblib.load(tmp_path / "it.joblib").predict_p(X), clf.predict_p(X))


@pytest.mark.filterwarnings("default::fullconformal.ConformalWarning")
def test_a_fit_tells_of_a_level_that_its_points_do_not_reach():
    """The classifier's own level too, of all points or of the smallest class."""
    with pytest.warns(ConformalWarning, match=r"confidence_level=0.9 needs more than the 5 training points there are"):
        FullConformalClassifier().fit(X[:5], Y[:5])
    rare = np.r_[np.zeros(38, dtype=int), 1, 1]
    with pytest.warns(ConformalWarning, match=r"more than the 2 training points of class 1 there are"):
        FullConformalClassifier(class_conditional=True).fit(X, rare)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformalWarning)
        FullConformalClassifier(l2=1.0).fit(X, rare)


@pytest.mark.parametrize("labels", [np.arange(60), np.arange(60).astype(str)])
def test_labels_that_may_be_something_else_are_told_before_the_fit(labels):
    few = np.zeros((60, 1))
    with pytest.warns(UserWarning, match="y has 60 classes for 60 points; is it a quantity or an identifier?"):
        FullConformalClassifier(KNeighborsClassifier(1)).fit(few, labels)


@pytest.mark.parametrize("kind", [FullConformalClassifier, SplitConformalClassifier])
def test_another_number_of_columns_is_told_with_what_to_do(kind):
    X, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 2
    clf = kind().fit(X, y)
    for wrong in (X[:, :3], np.hstack([X, X])):
        with pytest.raises(
            ValueError, match=r"X has \d features, but .* 4 features as input\. Give the columns that fit was"
        ):
            clf.predict_set(wrong)


@pytest.mark.parametrize("seed", ["x", -1, 2**32, 0.5])
def test_seeds_that_are_none(seed):
    """Also where the fit takes no random numbers."""
    with pytest.raises(ValueError, match=r"[Ss]eed"):
        FullConformalClassifier(random_state=seed).fit(X, Y)


@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
def test_errors_of_transformers_name_the_column(make):
    """scikit-learn quotes the text, but of twenty columns does not say which one holds it."""
    table = pd.DataFrame({"age": X[:, 0], "weight": X[:, 1], "kind": Y}).astype({"weight": object})
    numbers = make_column_transformer((StandardScaler(), ["age", "weight"]), (OneHotEncoder(), ["kind"]))
    clf = make(make_pipeline(numbers, LogisticRegression()))
    odd = table.copy()
    odd.loc[7, "weight"] = "n/k"
    with pytest.raises(
        ValueError, match=r"does not take X: could not convert .* 'n/k' \(found in 'weight'\); correct or"
    ):
        clf.fit(odd, Y)
    clf.fit(table, Y)
    with pytest.raises(ValueError, match=r"could not convert .* 'n/k' \(found in 'weight'\)"):
        clf.predict_p(odd)
    with pytest.raises(ValueError, match=r"Found unknown categories .*'new'.* \(found in 'kind'\)"):
        clf.predict_p(table.assign(kind="new"))


def test_transformers_that_fail_on_one_object_are_told_apart_from_missing_values():
    scaled = FunctionTransformer(lambda X: (X - X.mean(0)) / X.std(0))
    alone = np.errstate(invalid="ignore")
    with alone, pytest.raises(ValueError, match="another result for an object by itself than beside others"):
        FullConformalClassifier(make_pipeline(scaled, LogisticRegression())).fit(X, Y)


class Codes(nn.Module):
    """Logits of two columns of codes below five."""

    def __init__(self):
        super().__init__()
        self.rows, self.last = nn.Embedding(5, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.rows(x.long()).flatten(1))


@pytest.mark.parametrize("make", [FullConformalClassifier, SplitConformalClassifier])
def test_codes_that_an_embedding_lacks_are_named(make):
    codes = np.random.default_rng(0).integers(0, 5, (60, 2))
    clf = make(Codes(), max_epochs=1).fit(codes, codes[:, 0] > 1)
    with pytest.raises(ValueError, match="a code that no Embedding of the network has; raise num_embeddings"):
        clf.predict_p(codes + 3)


@pytest.mark.parametrize("method", ["folds", "influence"])
def test_dropout_of_nothing_is_no_dropout(method):
    """Layers of a Transformer hold Dropout(0) where they are to have none."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0))
    assert FullConformalClassifier(net, method=method, max_epochs=1).fit(X, Y).predict_p(X[:2]).shape == (2, 3)
