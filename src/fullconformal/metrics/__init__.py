"""Metrics of prediction sets, p-values and prediction intervals, each with its standard error.

Metrics of sets take a boolean array (m, C), metrics of p-values take floats (m, C); those that need the truth take the
labels ``y`` (m,) and ``classes`` (C,), the label of each column (0, ..., C - 1 by default).

Metrics of intervals take floats (m, 2), lower and upper end, and the true values ``y`` (m,).

For a method without p-values, use the largest ε at which each label is still in the set (``predict_epsilon``).
"""

from fullconformal.metrics.classification import (
    Gap,
    Slab,
    Strata,
    class_coverage,
    class_coverage_gap,
    coverage,
    empty_rate,
    error_rate,
    fuzziness,
    mean_size,
    nestedness_violations,
    observed_fuzziness,
    singleton_rate,
    size_auc,
    size_curve,
    size_stratified_coverage,
    summary,
    vovk_criteria,
    worst_slice_coverage,
)
from fullconformal.metrics.estimates import Curve, Estimate, Welch, per_object, welch
from fullconformal.metrics.intervals import (
    coverage_by,
    crps,
    interval_coverage,
    interval_score,
    interval_summary,
    interval_worst_slice_coverage,
    mean_width,
    median_width,
)

__all__ = [
    "Curve", "Estimate", "Gap", "Slab", "Strata", "Welch",
    "class_coverage", "class_coverage_gap", "coverage", "coverage_by", "crps", "empty_rate", "error_rate", "fuzziness",
    "interval_coverage", "interval_score", "interval_summary", "interval_worst_slice_coverage", "mean_size", "mean_width",
    "median_width", "nestedness_violations", "observed_fuzziness", "per_object", "singleton_rate", "size_auc", "size_curve",
    "size_stratified_coverage", "summary", "vovk_criteria", "welch", "worst_slice_coverage",
]  # fmt: skip
