"""Curvatures: ways to form and factorise 𝓗."""

from fullconformal.curvature.base import Curvature, CurvatureError, Factor
from fullconformal.curvature.dense import DenseCurvature, DenseFactor
from fullconformal.curvature.dual import Dual, DualFactor
from fullconformal.curvature.ekfac import EKFAC
from fullconformal.curvature.ggn import GGN
from fullconformal.curvature.hessian import Hessian
from fullconformal.curvature.kfac import KFAC
from fullconformal.curvature.kronecker import KroneckerFactor, Part
from fullconformal.curvature.layers import Place, is_layer

#: what factors are made of, which a saved predictor holds
FACTORS = (DenseFactor, KroneckerFactor, Part, Place, DualFactor)

__all__ = [
    "EKFAC",
    "FACTORS",
    "GGN",
    "KFAC",
    "Curvature",
    "CurvatureError",
    "DenseCurvature",
    "Dual",
    "Factor",
    "Hessian",
    "is_layer",
]
