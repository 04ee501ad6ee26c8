"""What a finished dataset is, as a table and as a plot of its documents' lengths: from the manifest alone."""

from __future__ import annotations

from pathlib import Path

from .manifest import Manifest


def table(manifest: Manifest) -> list[tuple[str, str]]:
    """Rows of name and value for the end of `make tokenize`."""
    tokens = manifest.tokens + manifest.validation_tokens
    return [
        ("documents", f"{manifest.documents:,} ({manifest.validation_documents:,} for validation)"),
        ("tokens", f"{tokens:,} ({manifest.validation_tokens:,} for validation)"),
        ("text", f"{manifest.text_bytes / 1e6:,.1f} MB, {manifest.text_bytes / tokens:.2f} bytes a token"),
        ("document length", f"{tokens / manifest.documents:,.0f} tokens on average, {manifest.longest:,} at most"),
        ("tokenizer", f"{manifest.vocabulary_size:,} tokens, sha256 {manifest.tokenizer_sha256[:12]}"),
        ("encoded by", f"{', '.join(manifest.backends)}; {manifest.checked:,} documents compared with the reference"),
        ("stored as", f"{manifest.dtype}, {len(manifest.shards):,} shards"),
        ("identity", manifest.identity[:16]),
        *(("note", note) for note in manifest.notes),
    ]


def plot_lengths(manifest: Manifest, path: Path) -> None:
    """Writes a PNG with how many documents have how many tokens; each bar's lengths are twice those of the one before."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    used = [i for i, count in enumerate(manifest.lengths) if count]
    classes = range(used[0], used[-1] + 1)
    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    axes.bar([str(2**i) for i in classes], [manifest.lengths[i] for i in classes], width=0.9)
    axes.set(xlabel="tokens in a document, from", ylabel="documents", title=f"{manifest.documents:,} documents")
    axes.tick_params(axis="x", rotation=45)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
