"""Figures, the comparison of methods, and the HTML report."""
