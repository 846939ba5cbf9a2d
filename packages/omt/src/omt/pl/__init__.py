"""Pictures of fitted mixtures and plans. Each returns its `Axes`; `show=` and `save=` are scanpy's."""

from omt.pl.flow import flow
from omt.pl.interpolation import interpolation
from omt.pl.mixture import mixture
from omt.pl.sankey import sankey
from omt.pl.solver import solver
from omt.pl.stability import stability
from omt.pl.transitions import transitions

__all__ = ["flow", "interpolation", "mixture", "sankey", "solver", "stability", "transitions"]
