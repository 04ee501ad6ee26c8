"""The keys of the text, and of the model that learns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from .families import FAMILIES
from .key import NAME, OWN_FILE, S3, Key
from .presets import PRESETS


@dataclass(frozen=True)
class Source:
    """One entry of data.sources that is more than a path."""

    path: Annotated[str, Key(minLength=1, maxLength=4096)]
    """What stands alone in a plain entry."""
    weight: Annotated[float | None, Key(minimum=1e-09, maximum=1_000_000_000)] = None
    """This source's share of the training samples, relative to the others. Given for all sources or
    for none; without it each counts by its tokens."""
    text_field: Annotated[str | None, Key(minLength=1, maxLength=255)] = None
    """The field of this source's records that holds the text. Null: data.text_field."""


@dataclass(frozen=True)
class Data:
    """The keys of data."""

    name: Annotated[str, Key(pattern=NAME)] = "stdlib"
    """The dataset's name: its folder is data/<name>. Runs with one data.name share one dataset."""
    sources: Annotated[
        tuple[str | Source, ...],
        Key(minItems=1, maxItems=10_000, items={"minLength": 1, "maxLength": 4096}),
    ] = ("stdlib",)
    """Where the text is: files, folders, globs and s3:// prefixes (.txt, .md, .py, .jsonl, .json,
    .csv, .tsv, .parquet, .arrow, .tar; the first four also as .gz and .zst),
    hf://owner/name[@revision][/config][:split] for a Hugging Face dataset, or `stdlib`, the Python
    files of this interpreter's standard library. An entry may be {path, weight, text_field}: its
    share of the samples, and its own text field."""
    text_field: Annotated[str, Key(minLength=1, maxLength=255)] = "text"
    """The field of a .jsonl record, or the column of a table, that holds the text."""
    tokenizer: Annotated[str, Key(minLength=1, maxLength=4096)] = "bpe"
    """`bpe` trains a byte-level BPE on the data; anything else is a path: a tokenizer.json, a
    Hugging Face folder (or hf://owner/name of the Hub), a SentencePiece tokenizer.model or a
    WordPiece vocab.txt."""
    vocab_size: Annotated[int, Key(unit="tokens", minimum=300, maximum=1_000_000)] = 4096
    """How many tokens the trained tokenizer has; ignored when data.tokenizer is a path."""
    validation_fraction: Annotated[float, Key(unit="fraction", minimum=1e-06, maximum=0.5)] = 0.01
    """The part of the documents, chosen by the hash of their text, that is kept for validation; of
    a few plain texts, the last part of each."""
    on_bad_record: Annotated[
        str | float,
        Key(
            exclusiveMinimum=0,
            maximum=0.5,
            pattern="^(stop|skip)$",
            examples=["stop", "skip", 0.001],
        ),
    ] = "stop"
    """What to do with unreadable records (a line that is not JSON, a text that is not UTF-8, a
    record without the text field). stop: the first one ends the work. skip: at most one in 10,000,
    rounded up, is skipped. A number is the largest share that may be skipped. manifest.json counts
    and lists them; a damaged file always ends the work."""
    tokenized_path: Annotated[
        str | None, Key(pattern=S3, maxLength=1024, examples=["s3://my-bucket/datasets"])
    ] = None
    """Where the dataset is kept: s3://bucket/prefix, below which it has its name. Null:
    data/<name>, on a file system that all nodes share."""
    tokenize_instance_type: Annotated[
        str | None, Key(backends=["batch"], maxLength=64, examples=["c7i.8xlarge"])
    ] = None
    """The EC2 type of a single machine that tokenizes instead of the fleet: x86 processors, no
    accelerators. `make setup` makes a queue and an environment for it; the machine starts and ends
    with the job. Null: the fleet's machines."""
    shuffle_window_mib: Annotated[int | None, Key(unit="MiB", minimum=16, maximum=1_048_576)] = None
    """The size of the window that samples are drawn from at random. Its blocks are drawn at random
    from the whole dataset, so that disk or S3 is read in large pieces. Null: the whole dataset, or
    1024 when data.tokenized_path is in S3."""

    @property
    def mixture(self) -> tuple[Source, ...]:
        """Every source in full, also those that are only a path."""
        return tuple(Source(part) if isinstance(part, str) else part for part in self.sources)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The sources' weights; None when they have none, and each counts by its tokens."""
        given = [source.weight for source in self.mixture if source.weight is not None]
        return tuple(given) if given and len(given) == len(self.sources) else None

    def text_field_of(self, source: int) -> str:
        """The field that holds the text of one source's records."""
        return self.mixture[source].text_field or self.text_field


@dataclass(frozen=True)
class Model:
    """The keys of model."""

    preset: Annotated[
        str | None,
        Key(
            anyOf=[
                {"enum": [*PRESETS, None]},
                {"type": "string", "pattern": "/", "maxLength": 4096},
            ],
            examples=["./models/llama-3.2-1b"],
            default="tiny",
        ),
    ]
    """A known shape, or the config.json of a Hugging Face folder (written with a slash) or of
    hf://owner/name[@revision] on the Hub."""
    family: Annotated[str, Key(default=None, enum=FAMILIES)]
    """The architecture: llama, mistral, qwen2, qwen3, olmo2, gemma and gpt2 predict the next token;
    bert and roberta predict masked tokens (bert also whether one text follows the other). Null: the
    preset's."""
    layers: Annotated[int, Key(default=None, unit="blocks", minimum=1, maximum=1000)]
    """Transformer blocks. Null: the preset's."""
    hidden_size: Annotated[int, Key(default=None, unit="features", minimum=8, maximum=131_072)]
    """Width of the residual stream. Null: the preset's."""
    heads: Annotated[int, Key(default=None, unit="heads", minimum=1, maximum=1024)]
    """Attention heads. Null: the preset's."""
    kv_heads: Annotated[int, Key(default=None, unit="heads", minimum=1, maximum=1024)]
    """Key and value heads (llama's grouped-query attention); divides heads. Null: the preset's, or
    as many as heads."""
    head_dim: Annotated[int | None, Key(unit="features", minimum=2, maximum=1024)] = field(
        kw_only=True, default=None
    )
    """Features of a head, in the families with rotary positions. Null: the preset's, or hidden_size
    over heads."""
    module: Annotated[
        str | None, Key(pattern=OWN_FILE + r"_model\.py$", maxLength=200, examples=["my_model.py"])
    ] = field(kw_only=True, default=None)
    """A Python file of yours, in the folder where make runs, with a class Model that replaces the
    network of model.family: docs/how-to/own-model.md. Memory and time are estimated as the
    family's. Null: the family's own network.
    """
    intermediate_size: Annotated[
        int, Key(default=None, unit="features", minimum=8, maximum=1_000_000)
    ]
    """Width of the feed-forward layer. Null: the preset's."""
    vocab_size: Annotated[int, Key(default=None, unit="tokens", minimum=2, maximum=2_000_000)]
    """Rows of the embedding. Null: the tokenizer's size, rounded up to a multiple of 64."""
    max_position_embeddings: Annotated[
        int, Key(default=None, unit="tokens", minimum=2, maximum=10_000_000)
    ]
    """The longest sequence that the model takes. Null: the preset's."""
    rope_theta: Annotated[float, Key(default=None, minimum=1, maximum=1_000_000_000_000)]
    """Base of llama's rotary position embedding. Null: the preset's."""
    norm_eps: Annotated[float, Key(default=None, minimum=1e-15, maximum=0.1)]
    """Added under the root of the norms. Null: the preset's, or the family's."""
    tie_word_embeddings: Annotated[bool, Key(default=None)]
    """Whether the output layer shares the embedding's weights. Null: the preset's."""
    rope_scaling: Annotated[
        float, Key(default=None, unit="factor", minimum=1, maximum=1_000_000)
    ] = 1.0
    """The factor by which low RoPE frequencies are divided for a longer context, as in Llama 3.1;
    1: none. Null: the preset's."""
    dropout: Annotated[float, Key(default=None, unit="fraction", minimum=0, exclusiveMaximum=1)] = (
        0.0
    )
    """The fraction of activations and attention weights dropped in training; llama takes none.
    Null: the preset's, or the family's."""

    @property
    def head_features(self) -> int:
        """Features of one head."""
        return self.head_dim or self.hidden_size // self.heads
