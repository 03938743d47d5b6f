"""torchfoam: Adam with folded moments, as a drop-in torch optimizer."""

from .adamw import from_adamw, to_adamw
from .cost import StepCost, step_bytes
from .fold import fold, residual, unfold
from .groups import param_groups, routing_table
from .kernels import backends
from .optim import FOAM, PAPER
from .release import GradientRelease

__all__ = [
    "FOAM",
    "PAPER",
    "GradientRelease",
    "StepCost",
    "backends",
    "fold",
    "from_adamw",
    "param_groups",
    "residual",
    "routing_table",
    "step_bytes",
    "to_adamw",
    "unfold",
]
__version__ = "0.3.0"
