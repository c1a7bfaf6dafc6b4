"""L2-penalised logistic regression on bags that differ by a point or two: fits, leaving points out, and error bounds."""
