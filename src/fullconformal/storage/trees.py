"""Decision trees of scikit-learn's as arrays: of forests one by one, of boosted ones all together.

Compiled code follows the nodes of a tree without looking, so that every node of a loaded tree is checked: a walk from the root must end,
and look at columns that are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.ensemble._forest import BaseForest
from sklearn.tree import BaseDecisionTree
from sklearn.tree._tree import TREE_LEAF, Tree

from fullconformal.storage.container import StorageError
from fullconformal.storage.limits import LIMITS
from fullconformal.storage.values import KINDS, Kind, Packer, Unpacker, among, expect, require

Array = npt.NDArray[Any]


def fields_of(nodes: Array) -> dict[str, Array]:
    """An array for each field of the nodes (k,)."""
    return {name: np.ascontiguousarray(nodes[name]) for name in nodes.dtype.names or ()}


def nodes_of(fields: Any, length: int, dtype: Any) -> Array:
    """The nodes (k,) again, of this many and of this type."""
    if set(expect(fields, dict)) != set(dtype.names):
        raise StorageError("a tree was saved by a scikit-learn with other nodes; use the version it was saved with")
    # Before there is room for them.
    for name, field in fields.items():
        require(expect(field, np.ndarray).shape == (length,) and field.dtype == dtype[name], "tree's nodes")
    nodes = np.zeros(length, dtype=dtype)
    for name, field in fields.items():
        nodes[name] = field
    return nodes


def check_nodes(left: Array, right: Array, feature: Array, inner: Array, n_features: int) -> None:
    """Raise unless the inner nodes of a tree (k,) have children that come after them, and look at columns that are there."""
    number = np.arange(len(left))[inner]
    # No walk then goes round in circles or past the last node.
    for child in (left[inner].astype(np.int64), right[inner].astype(np.int64)):
        require(not ((child <= number) | (child >= len(left))).any(), "tree's nodes")
    require(not ((feature < 0) | (feature >= n_features))[inner].any(), "columns that a tree looks at")


# Trees of forests -----------------------------------------------------------------------------------------------------


def pack_tree(tree: Any, _: Packer) -> dict[str, Any]:
    """The nodes of a decision tree, and the numbers (nodes, 1, C) at them."""
    state = tree.__getstate__()
    nodes, values = fields_of(state["nodes"]), state["values"]
    return {"n_features": int(tree.n_features), "nodes": nodes, "values": values}


def unpack_tree(values: dict[str, Any], _: Unpacker) -> Any:
    """The tree again, once its nodes are checked."""
    n_features, numbers = expect(values["n_features"], int), expect(values["values"], np.ndarray)
    # Of other numbers it would make these, in memory that was not counted.
    whole = numbers.dtype == np.float64 and numbers.ndim == 3 and numbers.shape[1] == 1 and numbers.size > 0
    require(whole and bool(np.isfinite(numbers).all()) and 0 < n_features <= LIMITS.sparse_columns, "tree")
    tree = Tree(n_features, np.array([numbers.shape[2]], dtype=np.intp), 1)
    nodes = nodes_of(values["nodes"], len(numbers), tree.__getstate__()["nodes"].dtype)
    left, right = nodes["left_child"], nodes["right_child"]
    inner = (left != TREE_LEAF) | (right != TREE_LEAF)
    check_nodes(left, right, nodes["feature"], inner, n_features)
    tree.__setstate__({
        "max_depth": depth(left, right, inner), "node_count": len(nodes), "nodes": nodes,
        "values": np.ascontiguousarray(numbers),
    })  # fmt: skip
    return tree


def depth(left: Array, right: Array, inner: Array) -> int:
    """How deep a tree goes. scikit-learn writes paths of objects into memory of this length, so that no file may say it."""
    children = np.concatenate([left[inner], right[inner]])
    if len(np.unique(children)) < len(children):
        raise StorageError("a tree's nodes have several parents")
    levels, level = 0, np.array([0])
    while len(level := level[inner[level]]):
        level, levels = np.concatenate([left[level], right[level]]), levels + 1
    return levels


KINDS["tree"] = Kind(Tree, pack_tree, unpack_tree)


def check_forest(estimator: Any) -> None:
    """Raise where a tree would be given objects of fewer columns than it looks at, as a forest does not check them for each of its trees;
    or where there are more classes than labels."""
    n_classes = getattr(estimator, "n_classes_", None)
    if n_classes is not None and n_classes != len(getattr(estimator, "classes_", ())):
        raise StorageError("a forest has other classes than labels")
    # Compiled code makes room for as many outputs as it is told of.
    trees = isinstance(estimator, (BaseForest, BaseDecisionTree))
    require(not trees or getattr(estimator, "n_outputs_", 1) == 1, "number of a forest's outputs")
    tree, width = getattr(estimator, "tree_", None), getattr(estimator, "n_features_in_", None)
    require(tree is None or (type(tree) is Tree and tree.n_features == width), "columns that a tree looks at")
    members = getattr(estimator, "estimators_", None)
    if isinstance(estimator, BaseForest) and members is not None:
        kind = type(expect(estimator.estimator, BaseEstimator))
        own = all(type(one) is kind and one.n_features_in_ == width for one in expect(members, list))
        require(own, "forest's trees")


# Boosted trees --------------------------------------------------------------------------------------------------------


def boosted_parts(model: Any) -> dict[str, Any]:
    """What fitted HistGradientBoosting predicts from: the nodes of all its trees, one after the other."""
    if model.is_categorical_ is not None:
        raise StorageError(f"{type(model).__name__} with categories cannot be saved; encode them in the Pipeline.")
    trees = [tree.nodes for iteration in model._predictors for tree in iteration]
    return {
        "classes": getattr(model, "classes_", None), "n_features": model.n_features_in_, "baseline": model._baseline_prediction,
        "nodes": fields_of(np.concatenate(trees)), "sizes": np.array([len(nodes) for nodes in trees]),
        "names": getattr(model, "feature_names_in_", None),
    }  # fmt: skip


def boosted_again(model: Any, parts: dict[str, Any]) -> Any:
    """The same in an unfitted HistGradientBoosting, once its nodes are checked; it predicts, and cannot go on training."""
    from sklearn._loss.loss import HalfBinomialLoss, HalfMultinomialLoss
    from sklearn.ensemble._hist_gradient_boosting.binning import _BinMapper
    from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
    from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

    baseline, sizes = (expect(parts[name], np.ndarray) for name in ("baseline", "sizes"))
    n_features, each, learnt = expect(parts["n_features"], int), 1, dict[str, Any]()
    if isinstance(model, HistGradientBoostingRegressor):
        among(model.loss, ("squared_error", "absolute_error", "gamma", "poisson", "quantile"))
        loss = model._get_loss(None)
    else:
        classes = learnt["classes_"] = expect(parts["classes"], np.ndarray)
        require(classes.ndim == 1 and len(classes) > 1, "boosted trees")
        each = 1 if len(classes) == 2 else len(classes)
        loss = HalfBinomialLoss() if each == 1 else HalfMultinomialLoss(n_classes=each)
    whole = sizes.ndim == 1 and sizes.dtype.kind == "i" and len(sizes) > 0 == len(sizes) % each
    whole &= bool((sizes > 0).all()) and 0 < n_features <= LIMITS.sparse_columns
    require(whole and baseline.shape == (1, each) and baseline.dtype == np.float64, "boosted trees")
    fields = expect(parts["nodes"], dict)
    nodes = nodes_of(fields, int(sizes.sum(dtype=object)) if len(sizes) < 2**22 else 0, PREDICTOR_RECORD_DTYPE)
    trees, no_bits = [], np.zeros((0, 8), dtype=np.uint32)
    for tree in np.split(nodes, np.cumsum(sizes)[:-1]):
        check_nodes(tree["left"], tree["right"], tree["feature_idx"], tree["is_leaf"] == 0, n_features)
        require(not tree["is_categorical"].any(), "boosted trees")
        trees.append(TreePredictor(np.ascontiguousarray(tree), no_bits, no_bits))
    bins = _BinMapper()
    # Bins are for training: here it asks which columns are categories, none of them.
    bins.is_categorical_, bins.bin_thresholds_ = np.zeros(n_features, dtype=np.uint8), []
    learnt |= {} if parts["names"] is None else {"feature_names_in_": expect(parts["names"], np.ndarray)}
    vars(model).update(
        n_features_in_=n_features, _n_features=n_features, n_trees_per_iteration_=each,
        is_categorical_=None, _preprocessor=None, _is_categorical_remapped=None, _baseline_prediction=baseline,
        _bin_mapper=bins, _loss=loss,
        _predictors=[trees[k : k + each] for k in range(0, len(trees), each)], **learnt,
    )  # fmt: skip
    return model
