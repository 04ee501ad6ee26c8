"""Table of the optimizers for `train.optimizer`, with all properties that config, plan and engine
use.
"""

from __future__ import annotations

from typing import NamedTuple


class Optimizer(NamedTuple):
    """Properties of an optimizer.

    Attributes:
        made_by: Dotted name of a function that takes engine.optimizer.Making.
        moments: State elements per parameter in block matrices.
        others: State elements per other parameter.
        whole: Whether an update depends on the whole matrix, even if it is sharded across ranks.
        orthogonal: Whether updates of block matrices are orthogonalized.
        formats: Supported values of train.param_dtype.
        xla: Dotted name of the class for NxD Core's optimizer, or "" if there is no such class.
    """

    name: str
    made_by: str
    moments: int = 2
    others: int = 2
    whole: bool = False
    orthogonal: bool = False
    formats: tuple[str, ...] = ("fp32",)
    xla: str = ""

    def numbers(self, matrices: int, others: int) -> int:
        """Returns the number of state elements for `matrices` block-matrix and `others` other
        parameters.
        """
        return self.moments * matrices + self.others * others


ENGINE = "trainfleet.engine"
OPTIMIZERS = {
    row.name: row
    for row in (
        # Loshchilov and Hutter 2017, arXiv:1711.05101
        Optimizer(
            "adamw", f"{ENGINE}.optimizer:adamw", formats=("fp32", "bf16"), xla="torch.optim:AdamW"
        ),
        # You et al. 2019, arXiv:1904.00962
        Optimizer("lamb", f"{ENGINE}.optimizer:lamb", whole=True, xla=f"{ENGINE}.optimizers:Lamb"),
        # Jordan 2024; Liu et al. 2025, arXiv:2502.16982
        Optimizer("muon", f"{ENGINE}.optimizer:muon", moments=1, whole=True, orthogonal=True),
    )
}
USUAL = next(iter(OPTIMIZERS))  # suggested if another optimizer does not work
