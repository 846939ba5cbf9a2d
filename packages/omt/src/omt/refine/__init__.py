"""Entropic transport between points of two mixtures: finer than their components, and still out of sample."""

from omt.refine.refined import RefinedTransport, refine

__all__ = ["RefinedTransport", "refine"]
