"""Verbs on AnnData: each reads what the one before wrote into `adata.uns["omt"]`, in the style of scanpy's `tl`."""

from omt.tl.bootstrap import bootstrap
from omt.tl.evaluate_interpolation import evaluate_interpolation
from omt.tl.fates import fates
from omt.tl.fit_mixtures import fit_mixtures
from omt.tl.growth import growth
from omt.tl.interpolate import interpolate
from omt.tl.map_to import map_to
from omt.tl.pull import pull
from omt.tl.push import push
from omt.tl.score_growth import score_growth
from omt.tl.transition_matrix import transition_matrix
from omt.tl.transport import transport

__all__ = [
    "bootstrap",
    "evaluate_interpolation",
    "fates",
    "fit_mixtures",
    "growth",
    "interpolate",
    "map_to",
    "pull",
    "push",
    "score_growth",
    "transition_matrix",
    "transport",
]
