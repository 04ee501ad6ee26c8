"""RoBERTa: BERT without the second question, masked again every time a sequence is seen (Liu et al.
2019, arXiv:1907.11692).
"""

from __future__ import annotations

from .bert import Encoder


class Roberta(Encoder):
    """Maps tokens [B, T] to logits [B, T, V], or with targets to the loss."""
