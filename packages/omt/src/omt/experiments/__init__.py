"""Experiments with a known answer: each returns numbers. `omt demo` runs them, tests assert them."""

from omt.experiments.branching import Branching, branching
from omt.experiments.known_map import KnownMapResult, known_map
from omt.experiments.labelled import DigitImages, consistency, digit_images, halves, shifted_digits

__all__ = [
    "Branching",
    "DigitImages",
    "KnownMapResult",
    "branching",
    "consistency",
    "digit_images",
    "halves",
    "known_map",
    "shifted_digits",
]
