"""Curvatures: ways to form and factorise 𝓗."""

from fullconformal.curvature.base import Curvature, CurvatureError, Factor
from fullconformal.curvature.ggn import GGN
from fullconformal.curvature.hessian import Hessian

__all__ = ["GGN", "Curvature", "CurvatureError", "Factor", "Hessian"]
