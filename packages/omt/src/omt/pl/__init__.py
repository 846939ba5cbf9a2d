"""Pictures of fitted mixtures and plans. Each returns its `Axes`; `show=` and `save=` are scanpy's."""

from omt.pl.flow import flow
from omt.pl.mixture import mixture
from omt.pl.sankey import sankey
from omt.pl.stability import stability
from omt.pl.transitions import transitions

__all__ = ["flow", "mixture", "sankey", "stability", "transitions"]
