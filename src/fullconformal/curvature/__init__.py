"""Curvatures: ways to form and factorise 𝓗."""

from fullconformal.curvature.base import Curvature, CurvatureError, Factor
from fullconformal.curvature.block import BlockGGN
from fullconformal.curvature.cg import CG
from fullconformal.curvature.dual import Dual
from fullconformal.curvature.ekfac import EKFAC
from fullconformal.curvature.ggn import GGN
from fullconformal.curvature.hessian import Hessian
from fullconformal.curvature.kfac import KFAC
from fullconformal.curvature.layers import is_layer

__all__ = [
    "CG",
    "EKFAC",
    "GGN",
    "KFAC",
    "BlockGGN",
    "Curvature",
    "CurvatureError",
    "Dual",
    "Factor",
    "Hessian",
    "is_layer",
]
