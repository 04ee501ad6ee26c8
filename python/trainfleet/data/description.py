"""Summarizes a finished dataset as a table, using only its manifest."""

from __future__ import annotations

from .manifest import Manifest


def table(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns (name, value) rows, which `make tokenize` prints at the end."""
    tokens = manifest.tokens + manifest.validation_tokens
    return [
        ("documents", f"{manifest.documents:,} ({manifest.validation_documents:,} for validation)"),
        ("tokens", f"{tokens:,} ({manifest.validation_tokens:,} for validation)"),
        *(
            [("learned tokens", f"{learned:,} ({learned / tokens:.0%} of all)")]
            if (learned := sum(shard.learned for shard in manifest.shards))
            else []
        ),
        (
            "text",
            f"{_size(manifest.text_bytes)}, {manifest.text_bytes / tokens:.2f} bytes per token",
        ),
        (
            "document length",
            f"{tokens / manifest.documents:,.0f} tokens on average, {manifest.longest:,} at most",
        ),
        (
            "tokenizer",
            f"{manifest.vocabulary_size:,} tokens, sha256 {manifest.tokenizer_sha256[:12]}",
        ),
        (
            "encoded by",
            f"{', '.join(manifest.backends)}; {manifest.checked:,} documents compared with the "
            "reference",
        ),
        ("stored as", f"{manifest.dtype}, {len(manifest.shards):,} shards"),
        ("identity", manifest.identity[:16]),
        *(("note", note) for note in manifest.notes),
    ]


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
