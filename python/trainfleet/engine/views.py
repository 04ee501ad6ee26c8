"""A dataset as a family of models is trained on it."""

from __future__ import annotations

from ..config import Config
from ..config.families import FAMILIES
from ..data.dataset import Dataset
from ..data.masking import Masked
from .batches import Samples


def samples_for(config: Config, dataset: Dataset) -> Samples:
    """The dataset as it is, or with tokens hidden."""
    family = FAMILIES[config.model.family]
    return dataset if family.causal else Masked(dataset, family.objective == "pairs", family.guesses)
