"""Experiments with a known answer: each returns numbers. `omt demo` runs them, tests assert them."""

from omt.experiments.branching import Branching, branching
from omt.experiments.held_out import HeldOut, held_out, held_out_emt, held_out_turning
from omt.experiments.known_map import KnownMapResult, known_map
from omt.experiments.labelled import (
    DigitImages,
    consistency,
    digit_images,
    halves,
    shifted_digits,
    significant_off_diagonal,
    two_halves,
)
from omt.experiments.lineages import LineageRow, TimeCourse, branching_course, lineage_table, worm_course
from omt.experiments.perturbation import Perturbation, interferon, perturbation
from omt.experiments.stability import Refits, stability
from omt.experiments.w2_benchmark import W2Benchmark, w2_benchmark, w2_benchmark_files, w2_benchmark_generated

__all__ = [
    "Branching",
    "DigitImages",
    "HeldOut",
    "KnownMapResult",
    "LineageRow",
    "Perturbation",
    "Refits",
    "TimeCourse",
    "W2Benchmark",
    "branching",
    "branching_course",
    "consistency",
    "digit_images",
    "halves",
    "held_out",
    "held_out_emt",
    "held_out_turning",
    "interferon",
    "known_map",
    "lineage_table",
    "perturbation",
    "shifted_digits",
    "significant_off_diagonal",
    "stability",
    "two_halves",
    "w2_benchmark",
    "w2_benchmark_files",
    "w2_benchmark_generated",
    "worm_course",
]
