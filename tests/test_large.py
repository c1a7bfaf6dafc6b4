"""The curvatures for large models: against the dense GGN where they are exact, against curvlinops where they are not."""

import numpy as np
import pytest
import torch
from cases import CURVATURES, MODELS, ResNet, draw
from curvlinops import EKFACLinearOperator, KFACLinearOperator
from torch import nn

from fullconformal import ConformalWarning, FullConformalClassifier, load
from fullconformal.curvature import EKFAC, GGN, KFAC, CurvatureError, Dual
from fullconformal.curvature.kronecker import Part, kronecker_factors
from fullconformal.curvature.layers import Layer, Place, read_layers
from fullconformal.losses import SOFTMAX
from fullconformal.models import mlp
from fullconformal.problem import Problem, flat


def dense(factor, problem):
    """The matrix that a factor inverts."""
    return torch.linalg.inv(factor.solve(torch.eye(problem.p, dtype=torch.float64)))


def theirs(operator, model, X, y):
    """A Kronecker operator of curvlinops on our conventions: sum form, exact softmax curvature, weights and biases together."""
    params = [q for q in model.parameters() if q.requires_grad]
    return operator(
        model, nn.CrossEntropyLoss(reduction="sum"), params, [(X, y)], fisher_type="type-2", kfac_approx="expand",
        separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip


def in_our_order(problem, matrix):
    """A matrix over the trainable parameters as `parameters()` lists them, in the order of the flat vector."""
    at, start = {}, 0
    for name, q in problem.model.named_parameters():
        if q.requires_grad:
            at[name] = torch.arange(start, start + q.numel(), dtype=torch.float64).view_as(q)
            start += q.numel()
    index = problem.pack(at).long()
    return matrix[index][:, index]


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "frozen", "odd", "residual", "resnet"])
def test_kronecker_factors_equal_curvlinops(name):
    model, X, y, _ = draw(name, 1)
    problem = Problem(model, X, y, 0.3, chunk=5)
    layers = read_layers(problem)
    operator = theirs(KFACLinearOperator, model, X, y)
    operator.compute_kronecker_factors()
    assert {layer.name for layer in layers} == set(operator._gradient_covariances)
    for layer, (A, G) in zip(layers, kronecker_factors(problem, layers, 2**20), strict=True):
        for ours, expected in ((A, operator._input_covariances), (G, operator._gradient_covariances)):
            assert (ours - expected[layer.name]).abs().max() < 1e-10 * (1 + ours.abs().max())


@pytest.mark.parametrize("ours, operator", [(KFAC, KFACLinearOperator), (EKFAC, EKFACLinearOperator)])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "frozen", "odd", "residual", "resnet"])
def test_kronecker_matrices_equal_curvlinops(name, ours, operator):
    model, X, y, _ = draw(name, 2)
    problem = Problem(model, X, y, 0.3, chunk=5)
    eye = torch.eye(problem.p, dtype=torch.float64)
    expected = in_our_order(problem, (theirs(operator, model, X, y) @ eye).detach()) + 0.3 * eye
    matrix = dense(ours().factor(problem), problem)
    # Eigenvectors of close eigenvalues are less sure than the matrix, and with them EK-FAC's correction.
    assert (matrix - expected).abs().max() < 1e-8 * expected.abs().max()


@pytest.mark.parametrize("curvature", [KFAC, EKFAC])
def test_kronecker_is_exact_for_one_layer_and_one_point(curvature):
    model, X, y, _ = draw("logistic", 3, n=1)
    problem = Problem(model, X, y, {"0.weight": 0.4, "0.bias": 0.1})  # and penalties may differ
    assert (dense(curvature().factor(problem), problem) - GGN().matrix(problem)).abs().max() < 1e-12


def test_ekfac_is_the_nearest_diagonal_in_the_basis_of_kfac():
    model, X, y, _ = draw("resnet", 3)
    problem = Problem(model, X, y, 0.5)
    exact, H = torch.zeros(problem.p, problem.p, dtype=torch.float64), GGN().matrix(problem)
    for layer in read_layers(problem):
        at = layer.place.slice
        exact[at, at] = H[at, at]
    distance = {c: (dense(c().factor(problem), problem) - exact).norm() for c in (KFAC, EKFAC)}
    assert distance[EKFAC] < distance[KFAC]
    # Traces of a projection: the diagonal of 𝓗 in an orthonormal basis has its trace.
    trace = dense(EKFAC().factor(problem), problem).trace()
    assert trace == pytest.approx(float(exact.trace()), rel=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_dual_is_the_ggn(name):
    model, X, y, _ = draw(name, 5)
    problem = Problem(model, X, y, 0.6, chunk=5)
    factor = Dual().factor(problem, 2**16)
    V = torch.randn(7, problem.p, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = GGN().factor(problem).solve(V)
    error = factor.solve(V) - expected
    assert error.abs().max() < 1e-10 * expected.abs().max()
    H = GGN().matrix(problem)
    relative = ((error @ H * error).sum(1) / (expected @ H * expected).sum(1)).sqrt()
    assert relative.max() < 1e-12  # what it promises, in the norm it promises


@pytest.mark.parametrize("curvature", [KFAC, EKFAC])
def test_free_parameters_are_damped_by_next_to_nothing(curvature):
    """Without a penalty on the biases 𝓗 is G ⊗ A + I ⊗ D with D singular: influences are those of the limit D → 0+."""
    model, X, y, _ = draw("mlp", 2, n=200)
    weights = {name: 0.5 for name, _ in model.named_parameters() if name.endswith("weight")}
    problem = Problem(model, X, y, weights)
    factor = curvature().factor(problem)
    assert 0 < factor.damping < 1e-6
    nearly = curvature().factor(Problem(model, X, y, {**dict.fromkeys(problem.params, 1e-6), **weights}))
    G = torch.cat([(left[:, :, None] * right[:, None]).flatten(1) for left, right in problem.gradients(X, y)], dim=1)
    ours, other = factor.influence(G)[0], nearly.influence(G)[0]
    assert (ours / other - 1).abs().max() < 1e-3


def test_the_softmax_root_squares_to_the_curvature():
    logits = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    B = SOFTMAX.root(logits)
    assert (B @ B.mT - SOFTMAX.curvature(logits)).abs().max() < 1e-15


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 3),
        nn.Linear(4, 3, bias=False),
        nn.Conv2d(4, 3, 3),
        nn.Conv2d(4, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
        nn.Conv2d(4, 3, 3, padding="same", dilation=2, bias=False),
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
    ],
    ids=repr,
)
def test_a_layer_is_a_matrix_times_its_inputs(module):
    module = module.double()
    x = torch.randn((2, 5, 4) if isinstance(module, nn.Linear) else (2, 4, 7, 6), dtype=torch.float64)
    bias = module.bias is not None
    W = module.weight.detach().flatten(1)
    W = torch.cat([W, module.bias.detach()[:, None]], dim=1) if bias else W
    layer = Layer("", module, Place(0, *W.shape, apart=bias), True, bias)
    assert (layer.outputs(module(x)) - layer.inputs(x) @ W.T).abs().max() < 1e-14
    flat = torch.cat([q.detach().flatten() for q in module.parameters()])
    assert torch.equal(layer.place.matrices(flat[None])[0], W)
    assert torch.equal(layer.place.flat(W[None])[0], flat)


class Twice(nn.Module):
    """One layer called twice, and one never."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.spare = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.outer(self.inner(torch.tanh(self.inner(x))))


def test_a_layer_called_twice_shares_its_weights():
    """Its two calls are two positions: EK-FAC keeps the trace of the exact block, cross terms included."""
    _, X, y, _ = draw("mlp", 0)
    model = Twice().double().eval()
    model.spare.requires_grad_(False)
    problem = Problem(model, X, y, 0.5)
    place = read_layers(problem)[0].place.slice
    exact, ours = GGN().matrix(problem), dense(EKFAC().factor(problem), problem)
    assert ours[place, place].trace() == pytest.approx(float(exact[place, place].trace()), rel=1e-10)


@pytest.mark.parametrize("curvature", [KFAC, EKFAC])
@pytest.mark.parametrize("name", MODELS)
def test_halves_from_the_layers_equal_half_solved_gradients(name, curvature):
    """Rows of given labels, and the influences of all labels at once, by one point a pass and by all together."""
    model, X, y, _ = draw(name, 5, n=9)
    problem = Problem(model, X, y, 0.7)
    factor = curvature().factor(problem)
    every = torch.arange(problem.n_classes).expand(9, -1)
    for memory in (1, 2**28):
        halves = factor.halves(problem, memory)
        expected, rows = factor.half(flat(problem.gradients(X, y))), torch.zeros(9, 1, problem.p + 1).double()
        halves.half(X, y[:, None], torch.full((9, 1), 2.0).double(), rows)
        assert (rows[:, 0, :-1] - 2 * expected).abs().max() < 1e-12 * expected.abs().max() and not rows[..., -1].any()
        rows = torch.zeros(9, problem.n_classes, problem.p).double()
        halves.half(X, every, torch.ones_like(rows[..., 0]), rows)
        assert (rows[torch.arange(9), y] - expected).abs().max() < 1e-12 * expected.abs().max()
        expected = torch.stack([factor.influence(flat(problem.gradients(X, c)))[0] for c in every.T], dim=1)
        assert (halves.influences(X, every) - expected).abs().max() < 1e-12 * expected.max()
        own = halves.influences(X, y[:, None])[:, 0]
        assert (own - expected[torch.arange(9), y]).abs().max() < 1e-12 * expected.max()


def test_sides_are_turned_before_or_after_the_sum_over_positions():
    """All four orders, by the shapes that choose them."""
    generator = torch.Generator().manual_seed(0)
    for T, o, i in ((2, 3, 4), (5, 3, 7), (5, 6, 4), (9, 3, 4)):
        a, delta, V, U, scale = (
            torch.randn(*shape, dtype=torch.float64, generator=generator)
            for shape in ((2, T, i), (2, 1, T, o), (o, o), (i, i), (o, i))
        )
        expected = torch.einsum("krtp,ktq,po,qi,oi->kroi", delta, a, V, U, scale)
        part = Part(Place(0, o, i, apart=False), V, U, scale)
        assert (part.half(a, delta) - expected).abs().max() < 1e-13 * expected.abs().max()


def factored(curvature, model, penalty=0.5):
    _, X, y, _ = draw("mlp", 0)
    return curvature.factor(Problem(model.double().eval(), X, y, penalty))


def test_what_cannot_be_had_says_why():
    with pytest.raises(CurvatureError, match=r"never calls spare \(Linear\)"):
        factored(KFAC(), Twice())
    with pytest.raises(CurvatureError, match=r"1 \(LayerNorm\) has trainable parameters outside Linear"):
        factored(EKFAC(), nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    tied[2].weight = tied[0].weight
    with pytest.raises(CurvatureError, match="2 shares its parameters"):
        factored(KFAC(), tied)
    for curvature, name in ((Dual(), "dual"), (KFAC(0.0), "kfac")):
        with pytest.raises(CurvatureError, match=f"'{name}' needs a penalty on every parameter.*0.bias.*damping"):
            factored(curvature, mlp(6, (4,), 3), {"0.weight": 1.0, "2.weight": 1.0})


@pytest.mark.parametrize("curvature", [GGN, KFAC, EKFAC, Dual])
def test_estimates_grow_with_the_problem(curvature):
    """More points never need less; and a factor holds no more than was estimated."""
    model, X, y, _ = draw("mlp", 0, n=40)
    small, large = Problem(model, X[:10], y[:10], 0.5), Problem(model, X, y, 0.5)
    assert 0 < curvature().memory(small) <= curvature().memory(large)
    assert 0 < curvature().flops(small) < curvature().flops(large)
    assert curvature().factor(large).nbytes <= curvature().memory(large)


# In the classifier ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, 60)
    X[np.arange(60), 0, y, y] += 3
    return X, y


def fitted(images, net=None, **options):
    torch.manual_seed(0)
    net = ResNet().eval() if net is None else net
    options = {"method": "influence", "random_state": 0, "max_epochs": 20, "dtype": "float64", "l2": 0.1, **options}
    return FullConformalClassifier(net, **options).fit(*images)


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
@pytest.mark.parametrize("curvature", CURVATURES)
def test_every_curvature_in_the_classifier(images, curvature):
    """All approximations give p-values; pruning changes none of them; one fit serves all."""
    X, _ = images
    clf = fitted(images, curvature=curvature)
    assert f"{curvature}: " in str(clf.diagnose())
    p = clf.predict_p(X[:4])
    assert np.array_equal(clf.set_params(prune=True).predict_p(X[:4]), p)
    assert np.array_equal(clf.set_params(prune=False).predict_p(X[:4]), p)
    for approximation in ("indirect", "newton"):
        other = clf.set_params(approximation=approximation).predict_p(X[:2])
        assert ((other > 0) & (other <= 1)).all()


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_exact_curvatures_give_the_p_values_of_the_ggn(images):
    X, _ = images
    p = [fitted(images, curvature=name).predict_p(X[:6]) for name in ("ggn", "dual")]
    assert np.array_equal(p[0], p[1])


def test_parameters_elsewhere_are_held_fixed_and_told(images):
    with pytest.warns(
        ConformalWarning, match=r"6 parameters of BatchNorm2d were held fixed: ekfac knows Linear"
    ) as told:
        clf = fitted(images, curvature="ekfac")
    assert sum("held fixed" in str(w.message) for w in told) == 1
    assert clf._fitted.problem.p == sum(q.numel() for q in ResNet().parameters()) - 6
    assert "held fixed" in str(clf.diagnose())
    assert "held fixed" not in str(fitted(images, curvature="dual").diagnose())


def test_without_layers_there_is_no_kfac():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x[:, :3] * self.scale

    X, y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 3
    for name in ("kfac", "last_layer"):
        with pytest.raises(CurvatureError, match=f"'{name}' needs"):
            FullConformalClassifier(Scale(), curvature=name, max_epochs=1).fit(X, y)


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_auto_takes_the_first_that_fits():
    """A network of 2,583 parameters and few points, then many, with ever less memory: GGN, dual, EK-FAC, last layer, nothing."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
    net = mlp(4, (100, 20), 3)  # p = 2,583

    def chosen(memory_budget, repeats=1):
        clf = FullConformalClassifier(net, method="influence", max_epochs=0, memory_budget=memory_budget)
        clf.fit(np.tile(X, (repeats, 1)), np.tile(y, repeats))
        return clf._fitted.curvature, clf.diagnose()

    def says_so(facts):
        return any("stands in for the whole GGN" in text and "0.15 GiB" in text for text in facts.warnings)

    name, facts = chosen(0.15)
    assert name == "ggn" and not says_so(facts)  # 2,583² × 24 bytes = 0.149 GiB
    name, facts = chosen(0.01)
    assert name == "dual" and [text.split(":")[0] for text in facts.estimates] == ["ggn", "dual"]
    assert "ggn: 0.15 GiB" in str(facts) and "dual: " in str(facts) and not says_so(facts)
    name, facts = chosen(0.01, repeats=100)
    assert name == "ekfac" and says_so(facts)
    name, facts = chosen(5e-4, repeats=100)
    assert name == "ggn of the last layer" and says_so(facts)
    with pytest.raises(MemoryError, match="no curvature of 2,583 parameters fits"):
        chosen(1e-5)


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_auto_shows_its_choice(images, capsys):
    fitted(images, verbose=1)
    assert "curvature ggn, of what was considered: ggn: " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_nothing_of_size_n_times_p_is_kept(images):
    """With a budget below n·p numbers, gradients are formed again when they are needed, and the p-values stay the same."""
    X, _ = images
    plenty, lean = (fitted(images, curvature="ekfac", memory_budget=b, prune=True) for b in (1.0, 4e-4))
    prepared = lean._fitted.prepared
    assert prepared.gradients is None and prepared.half is None
    assert np.array_equal(plenty.predict_p(X[:6]), lean.predict_p(X[:6]))
    assert np.array_equal(plenty.predict_p(X[:6]), lean.set_params(prune=False).predict_p(X[:6]))


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_saved_predictor_gives_the_same_p_values(images, curvature, tmp_path):
    X, _ = images
    clf = fitted(
        images, nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)), curvature=curvature
    )
    clf.save(tmp_path / "it")
    again = load(tmp_path / "it")
    assert np.array_equal(again.predict_p(X[:5]), clf.predict_p(X[:5]))
    assert str(again.diagnose()) == str(clf.diagnose())
