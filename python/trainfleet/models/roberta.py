"""RoBERTa: BERT without the second question, masked anew every time a sequence is seen (Liu et al.
2019, arXiv:1907.11692).
"""

from __future__ import annotations

from .bert import Encoder


class Roberta(Encoder):
    """tokens [B, T] -> logits [B, T, V], or with targets the loss."""
