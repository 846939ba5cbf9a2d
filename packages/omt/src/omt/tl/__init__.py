"""Verbs on AnnData: each reads what the one before wrote into `adata.uns["omt"]`, in the style of scanpy's `tl`."""

from omt.tl.fates import fates
from omt.tl.fit_mixtures import fit_mixtures
from omt.tl.map_to import map_to
from omt.tl.pull import pull
from omt.tl.push import push
from omt.tl.transition_matrix import transition_matrix
from omt.tl.transport import transport

__all__ = ["fates", "fit_mixtures", "map_to", "pull", "push", "transition_matrix", "transport"]
