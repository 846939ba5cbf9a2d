"""Fitting mixtures: seeding, batch and stepwise EM, split and merge, labels, checkpoints.

:func:`omt.fitting.em.fit_mixture` is the way in; *starts* finds a first mixture, *sweeps* makes one pass over the data,
*iterate* repeats it.
"""
