"""The classifiers people import: full, split and cross conformal prediction."""
