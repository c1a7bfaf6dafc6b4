"""Curvatures: ways to form and factorise 𝓗."""

from fullconformal.curvature.base import Curvature, CurvatureError, Factor
from fullconformal.curvature.dense import DenseCurvature
from fullconformal.curvature.dual import Dual
from fullconformal.curvature.ekfac import EKFAC
from fullconformal.curvature.ggn import GGN
from fullconformal.curvature.hessian import Hessian
from fullconformal.curvature.kfac import KFAC

#: curvatures by the name that users give; of the last layer alone the GGN, or a Kronecker product
CURVATURES: dict[str, type[Curvature]] = {
    "hessian": Hessian,
    "ggn": GGN,
    "kfac": KFAC,
    "ekfac": EKFAC,
    "last_layer": GGN,
    "dual": Dual,
}

__all__ = [
    "CURVATURES", "EKFAC", "GGN", "KFAC", "Curvature", "CurvatureError", "DenseCurvature", "Dual", "Factor", "Hessian",
]  # fmt: skip
