"""The optimizers that `train.optimizer` names, a row each: all that config, plan and engine know of
one.
"""

from __future__ import annotations

from typing import NamedTuple


class Optimizer(NamedTuple):
    """`moments`: numbers of state for each number of a block's matrices; `others`, for each of all
    other parameters.

    `whole`: an update depends on its whole matrix, also where ranks hold slices. `orthogonal`: it
    makes those of the blocks' matrices orthogonal. `formats`: of weights and moments
    (train.param_dtype). What makes it, by dotted name: `made_by` takes engine.optimizer.Making,
    `xla` is the class that NxD Core's takes ("": none).
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
        """Returns the numbers of state for these counts of blocks' matrices and of other
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
USUAL = next(iter(OPTIMIZERS))  # what works wherever another does not
