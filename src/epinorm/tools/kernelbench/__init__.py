"""Problem files in the format of KernelBench: loading them and judging on them."""

from epinorm.tools.kernelbench.problem import ProblemError, ProblemFile, load_problem

__all__ = ["ProblemError", "ProblemFile", "load_problem"]
