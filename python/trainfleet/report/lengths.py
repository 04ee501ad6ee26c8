"""Plots the lengths of a dataset's documents in tokens."""

from __future__ import annotations

from pathlib import Path

from ..data.manifest import Manifest
from .history import quantity
from .plots import BLUE, INK, STYLE, save, sheet


def draw(name: str, manifest: Manifest, path: Path) -> None:
    """Writes a PNG with a bar for each class of lengths; each class begins at twice the length of
    the one before.
    """
    from matplotlib import rc_context

    used = [number for number, count in enumerate(manifest.lengths) if count]
    classes = range(used[0], used[-1] + 1)
    with rc_context(STYLE):
        figure, axes = sheet(
            f"{name}: {manifest.documents:,} documents, the longest of {manifest.longest:,} tokens",
            pad=12,
        )
        bars = axes.bar(
            [_power(number) for number in classes],
            [manifest.lengths[number] for number in classes],
            0.9,
            color=BLUE,
        )
        axes.bar_label(
            bars,
            [quantity(manifest.lengths[number]) for number in classes],
            padding=2,
            size=8,
            color=INK,
        )
        axes.set_xlabel("tokens in a document, at least")
        axes.set_ylabel("documents")
        axes.yaxis.set_major_formatter(lambda value, _: quantity(value))
        axes.tick_params(axis="x", labelsize=8, length=0)
        save(figure, path)


def _power(number: int) -> str:
    """Returns 2 to that power, like 512, 1k, 64k, 1M."""
    return f"{2 ** (number % 10)}{['', 'k', 'M', 'G'][number // 10]}"
