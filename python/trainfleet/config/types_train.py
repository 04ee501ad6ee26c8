"""Config keys of a run: its data, model, training, layout, checkpoints and budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from .families import FAMILIES, PRESETS
from .key import NAME, OWN_FILE, S3, Key
from .optimizers import OPTIMIZERS

# Text field of conversations. It is not the name of a field.
CHAT = "messages`, or `prompt` and `completion"
# Backends whose nodes have this folder. Container images do not contain the user's own files.
ON_HOSTS = ("local", "ssh", "ec2", "slurm", "parallelcluster")


def own_file(kind: str) -> Key:
    """Returns the rules for a key that names the user's own Python file."""
    return Key(
        pattern=OWN_FILE + rf"_{kind}\.py$",
        maxLength=200,
        examples=[f"my_{kind}.py"],
        backends=ON_HOSTS,
    )


@dataclass(frozen=True)
class Source:
    """Entry in data.sources with options in addition to the path."""

    path: Annotated[str, Key(minLength=1, maxLength=4096)]
    """Path of the source, in any form that data.sources accepts."""
    weight: Annotated[float | None, Key(minimum=1e-09, maximum=1_000_000_000)] = None
    """Share of the training samples from this source, relative to the other sources. Set it for all
    sources or for none. Without weights, each source's share is proportional to its tokens."""
    text_field: Annotated[str | None, Key(minLength=1, maxLength=255)] = None
    """Record field that contains the text in this source. Defaults to data.text_field."""


@dataclass(frozen=True)
class Data:
    """Keys of data."""

    name: Annotated[str, Key(pattern=NAME)] = "stdlib"
    """Dataset name, used as the folder data/<name>. Runs with the same data.name share
    one dataset."""
    sources: Annotated[
        tuple[str | Source, ...],
        Key(minItems=1, maxItems=10_000, items={"minLength": 1, "maxLength": 4096}),
    ] = ("stdlib",)
    """Text to train on. Entries can be files, folders, globs and s3:// prefixes (.txt, .md, .py,
    .jsonl, .json, .csv, .tsv, .parquet, .arrow, .tar; the first four also as .gz and .zst). Use
    hf://owner/name[@revision][/config][:split] for a Hugging Face dataset, or `stdlib` for the
    Python files of this interpreter's standard library, and `toy-stories` for 4,500 short stories
    that come with trainfleet. An entry can also be {path, weight,
    text_field}, which sets the source's share of the samples and its text field."""
    text_field: Annotated[str, Key(minLength=1, maxLength=255)] = "text"
    """Field of a .jsonl record, or column of a table, that contains the text."""
    tokenizer: Annotated[str, Key(minLength=1, maxLength=4096)] = "bpe"
    """Tokenizer: `bpe`, or the path of an existing tokenizer. `bpe` trains a byte-level BPE on the
    data. A path can be a tokenizer.json, a Hugging Face folder (or hf://owner/name on the Hub), a
    SentencePiece tokenizer.model or a WordPiece vocab.txt."""
    vocab_size: Annotated[int, Key(unit="tokens", minimum=300, maximum=1_000_000)] = 4096
    """Vocabulary size of the trained tokenizer. Ignored if data.tokenizer is a path."""
    validation_fraction: Annotated[float, Key(unit="fraction", minimum=1e-06, maximum=0.5)] = 0.01
    """Fraction of the documents held out for validation, selected by a hash of their text. If the
    data is only a few plain text files, the last part of each file is held out instead."""
    on_bad_record: Annotated[
        str | float,
        Key(
            exclusiveMinimum=0,
            maximum=0.5,
            pattern="^(stop|skip)$",
            examples=["stop", "skip", 0.001],
        ),
    ] = "stop"
    """What to do with unreadable records, such as a line that is not JSON, text that is not UTF-8,
    or a record without the text field. `stop` fails at the first one. `skip` skips at most one in
    10,000, rounded up. A number sets the maximum fraction to skip. manifest.json counts and lists
    the skipped records. A damaged file is always an error."""
    tokenized_path: Annotated[
        str | None, Key(pattern=S3, maxLength=1024, examples=["s3://my-bucket/datasets"])
    ] = None
    """S3 location of the tokenized dataset, as s3://bucket/prefix. The dataset is in a folder with
    its name. Defaults to data/<name>, on a file system that all nodes share."""
    tokenize_instance_type: Annotated[
        str | None, Key(backends=["batch"], maxLength=64, examples=["c7i.8xlarge"])
    ] = None
    """EC2 instance type of a single machine that tokenizes instead of the fleet. It must have x86
    processors and no accelerators. `make setup` creates a queue and a compute environment for it,
    and the machine runs only as long as the job. Defaults to the fleet's machines."""
    shuffle_window_mib: Annotated[int | None, Key(unit="MiB", minimum=16, maximum=1_048_576)] = None
    """Size of the window from which samples are drawn at random. The window is filled with random
    blocks of the whole dataset, so that reads from disk or S3 are large. Defaults to the whole
    dataset, or to 1024 if data.tokenized_path is in S3."""

    conversations: bool = False
    """Whether the records are conversations: `messages` (a list of objects with `role` and
    `content`), or `prompt` and `completion`. The tokenizer's chat template renders them, and the
    loss counts only the assistant's tokens. Sequences contain only whole conversations, and
    train.document_mask is on. See docs/how-to/conversations.md."""

    @property
    def mixture(self) -> tuple[Source, ...]:
        """Returns all sources as Source objects, including those given only as a path."""
        return tuple(Source(part) if isinstance(part, str) else part for part in self.sources)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Returns the sources' weights, or None if each source's share is proportional to its
        tokens.
        """
        given = [source.weight for source in self.mixture if source.weight is not None]
        return tuple(given) if given and len(given) == len(self.sources) else None

    def text_field_of(self, source: int) -> str:
        """Returns the field that contains the text in one source's records, or CHAT."""
        return CHAT if self.conversations else self.mixture[source].text_field or self.text_field


@dataclass(frozen=True)
class Model:
    """Keys of model."""

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
    """Name of a known model shape, or a Hugging Face config.json to read. For the latter, give a
    folder (a path with a slash) or hf://owner/name[@revision] on the Hub."""
    family: Annotated[str, Key(default=None, enum=FAMILIES)]
    """Model architecture. `llama`, `mistral`, `qwen2`, `qwen3`, `olmo2`, `gemma`, `phi3` and `gpt2`
    predict the next token. `bert` and `roberta` predict masked tokens, and `bert` also predicts
    whether one text follows another. Defaults to the preset's family."""
    layers: Annotated[int, Key(default=None, unit="blocks", minimum=1, maximum=1000)]
    """Number of transformer blocks. Defaults to the preset's value."""
    hidden_size: Annotated[int, Key(default=None, unit="features", minimum=8, maximum=131_072)]
    """Width of the residual stream. Defaults to the preset's value."""
    heads: Annotated[int, Key(default=None, unit="heads", minimum=1, maximum=1024)]
    """Number of attention heads. Defaults to the preset's value."""
    kv_heads: Annotated[int, Key(default=None, unit="heads", minimum=1, maximum=1024)]
    """Number of key/value heads for grouped-query attention, which must divide model.heads.
    Defaults to the preset's value, or to model.heads."""
    head_dim: Annotated[int | None, Key(unit="features", minimum=2, maximum=1024)] = field(
        kw_only=True, default=None
    )
    """Features per head, in families with rotary positions. Defaults to the preset's value, or to
    hidden_size / heads."""
    module: Annotated[str | None, own_file("model")] = field(kw_only=True, default=None)
    """Python file with a Model class that replaces the network of model.family. The file is in the
    folder where you run make (docs/how-to/own-model.md). Memory and time are still estimated for
    the family. Defaults to the family's network."""
    intermediate_size: Annotated[
        int, Key(default=None, unit="features", minimum=8, maximum=1_000_000)
    ]
    """Width of the feed-forward layer. Defaults to the preset's value."""
    vocab_size: Annotated[int, Key(default=None, unit="tokens", minimum=2, maximum=2_000_000)]
    """Number of rows in the embedding. Defaults to the tokenizer's size, rounded up to a multiple
    of 64."""
    max_position_embeddings: Annotated[
        int, Key(default=None, unit="tokens", minimum=2, maximum=10_000_000)
    ]
    """Maximum sequence length that the model supports. Defaults to the preset's value."""
    rope_theta: Annotated[float, Key(default=None, minimum=1, maximum=1_000_000_000_000)]
    """Base of the rotary position embedding (RoPE). Defaults to the preset's value."""
    norm_eps: Annotated[float, Key(default=None, minimum=1e-15, maximum=0.1)]
    """Epsilon of the normalization layers. Defaults to the preset's value, or to the family's."""
    tie_word_embeddings: Annotated[bool, Key(default=None)]
    """Whether the output layer shares the embedding's weights. Defaults to the preset's value."""
    rope_scaling: Annotated[
        float, Key(default=None, unit="factor", minimum=1, maximum=1_000_000)
    ] = 1.0
    """Factor by which low RoPE frequencies are divided for a longer context, as in Llama 3.1. A
    factor of 1 means no scaling. Null means the preset's value."""
    dropout: Annotated[float, Key(default=None, unit="fraction", minimum=0, exclusiveMaximum=1)] = (
        0.0
    )
    """Fraction of activations and attention weights dropped in training. `llama` has no dropout.
    Null means the preset's value, or the family's."""

    @property
    def head_features(self) -> int:
        """Returns the number of features per head."""
        return self.head_dim or self.hidden_size // self.heads


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Keys of train.parallelism."""

    fsdp: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1_048_576)]
    """Number of ranks across which optimizer state, weights and gradients are sharded. These ranks
    train on different sequences. If null, the choice is one rank (no sharding), the ranks of a
    node, or all ranks."""
    tensor: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1024)]
    """Number of ranks across which each matrix is split. If null, chosen automatically, within a
    node."""
    pipeline: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1024)]
    """Number of pipeline stages. Defaults to the fewest with which the model fits in memory."""
    context: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1024)]
    """Number of ranks across which each sequence is split. Defaults to 1."""
    zero_stage: Annotated[int, Key(default=None, enum=[1, 3])] = 3
    """ZeRO stage. 1 shards only the optimizer state, which needs less traffic. 3 also shards
    weights and gradients, which needs less memory. If null, chosen automatically."""
    virtual_stages: Annotated[int, Key(default=None, unit="stages", minimum=1, maximum=64)] = 1
    """Number of stages per pipeline rank. 1 selects the 1F1B schedule. More stages select the
    interleaved schedule, with less idle time but more communication. If null, chosen
    automatically."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Keys of train."""

    steps: Annotated[int, Key(unit="steps", minimum=1, maximum=1_000_000_000)] = 500
    """Number of optimizer steps. Raise it to continue a finished run."""
    global_batch_size: Annotated[int, Key(unit="sequences", minimum=1, maximum=1_000_000)] = 16
    """Number of sequences per optimizer step, across all ranks. It is independent of the number of
    nodes."""
    micro_batch_size: Annotated[
        int, Key(default=None, unit="sequences", minimum=1, maximum=1_000_000)
    ]
    """Number of sequences per rank in one forward pass. Gradients are accumulated over as many
    passes as the global batch needs. Defaults to the largest size that divides the rank's share and
    fits in memory."""
    sequence_length: Annotated[int, Key(unit="tokens", minimum=2, maximum=10_000_000)] = 256
    """Number of tokens per sequence."""
    learning_rate: Annotated[float, Key(minimum=1e-12, maximum=1)] = 0.003
    """Peak learning rate."""
    min_lr_ratio: Annotated[float, Key(unit="fraction", minimum=0, maximum=1)] = 0.1
    """Final learning rate, as a fraction of train.learning_rate."""
    optimizer: Annotated[str, Key(enum=OPTIMIZERS)] = "adamw"
    """Optimizer: adamw, lamb or muon. `lamb` scales each matrix's update to the size of the matrix,
    for very large batches. `muon` orthogonalizes the update of each matrix in a block, and uses
    AdamW for embeddings, norms and the output layer."""
    schedule: Annotated[str, Key(enum=["cosine", "linear", "polynomial", "wsd"])] = "cosine"
    """Learning rate schedule after the warm-up: cosine, linear, polynomial (with exponent
    train.schedule_power) or wsd. `wsd` keeps the rate constant and decays it to its minimum in the
    last train.decay_steps."""
    schedule_steps: Annotated[
        int, Key(default=None, unit="steps", minimum=1, maximum=1_000_000_000)
    ]
    """Length of the learning rate schedule. Defaults to train.steps. If it is longer than the run,
    the rate does not reach its minimum."""
    schedule_power: Annotated[float, Key(minimum=0.001, maximum=10)] = 1.0
    """Exponent of the polynomial schedule. 1 means linear decay."""
    decay_steps: Annotated[int, Key(default=None, unit="steps", minimum=1, maximum=1_000_000_000)]
    """Number of steps over which the wsd schedule decays to its minimum. Defaults to a fifth of
    train.schedule_steps."""
    warmup_steps: Annotated[int, Key(default=None, unit="steps", minimum=0, maximum=1_000_000_000)]
    """Number of linear warm-up steps. Defaults to 5 % of train.steps, up to 2000."""
    weight_decay: Annotated[float, Key(minimum=0, maximum=10)] = 0.1
    """Decoupled weight decay, applied only to matrices."""
    beta1: Annotated[float, Key(minimum=0, exclusiveMaximum=1)] = 0.9
    """Decay rate of the optimizer's first moment."""
    beta2: Annotated[float, Key(minimum=0, exclusiveMaximum=1)] = 0.95
    """Decay rate of the optimizer's second moment."""
    epsilon: Annotated[float, Key(minimum=1e-30, maximum=1)] = 1e-08
    """Constant added to the square root of the second moment."""
    gradient_clip: Annotated[float, Key(minimum=0, maximum=1_000_000_000)] = 1.0
    """Maximum global gradient norm. Larger gradients are scaled down to it. 0 disables clipping."""
    spike_sigmas: Annotated[
        float, Key(default=None, unit="standard deviations", minimum=0, maximum=1_000_000_000)
    ]
    """Threshold for skipping a step, in standard deviations. A step is skipped if its loss or
    gradient norm exceeds the mean of the last 128 steps by more than this. 0 skips only steps with
    a non-finite loss or gradient norm. Defaults to 6, and to 0 on platform neuron-xla."""
    max_consecutive_skips: Annotated[int, Key(unit="steps", minimum=1, maximum=1_000_000)] = 10
    """Number of consecutive skipped steps after which the run stops with an error."""
    precision: Annotated[str, Key(enum=["auto", "fp32", "bf16", "fp16", "fp8"])] = "auto"
    """Number format of the forward and backward pass. `auto` selects bf16 if every rank's device
    has bf16 instructions (GPUs since Ampere, Trainium) or is faster with bf16 (CPUs, as measured in
    a trial that `make plan` shows). Otherwise, `auto` selects fp16 on Volta and Turing GPUs such as
    the V100, and fp32 elsewhere. In fp32, losses agree to 1e-6 across any number of ranks; in bf16
    and fp16, they agree only within rounding. `fp16` keeps weights and moments in fp32, scales the
    loss dynamically, and skips a step on all ranks if gradients overflow. It reports the metrics
    loss_scale and overflowed, has not yet been run on a GPU, and is ten times slower than bf16 on
    most CPUs. `fp8` uses bf16, except for fp8 matmuls in the blocks (GPUs since Ada and Hopper). It
    requires torchao (the extra fp8) and has not yet been run on a GPU."""
    param_dtype: Annotated[str, Key(enum=["fp32", "bf16"])] = "fp32"
    """Number format of weights, gradients and optimizer moments. `bf16` halves their memory, and
    requires train.precision bf16 and train.optimizer adamw. Values are rounded stochastically so
    that small updates accumulate. The final loss is slightly higher than with fp32."""
    seed: Annotated[int, Key(minimum=0, maximum=2_147_483_647)] = 1
    """Random seed for the initial weights and the order of the samples."""
    log_every: Annotated[int, Key(unit="steps", minimum=1, maximum=1_000_000_000)] = 10
    """Number of steps between lines of metrics."""
    loggers: Annotated[
        tuple[str, ...],
        Key(maxItems=3, uniqueItems=True, items={"enum": ["wandb", "mlflow", "trackio"]}),
    ] = ()
    """Services that also receive every line of metrics: wandb, mlflow or trackio. Each requires its
    package (such as `pip install wandb`) and its environment variables, such as WANDB_API_KEY in
    fleet.secrets or WANDB_MODE=offline. A run continues if a service fails."""
    callback: Annotated[str | None, own_file("callback")] = None
    """Python file with a function after_step(step, trainer), which every rank calls after each
    optimizer step. The file is in the folder where you run make (docs/how-to/own-model.md). Null
    means no callback."""
    validate_every: Annotated[int, Key(unit="steps", minimum=0, maximum=1_000_000_000)] = 100
    """Number of steps between validations. The last step is always validated. 0 means only the last
    step."""
    validation_sequences: Annotated[
        int, Key(unit="sequences", minimum=1, maximum=1_000_000_000)
    ] = 64
    """Number of sequences per validation, up to the size of the validation split. If data.sources
    has several entries, they share as many sequences again for their separate losses."""
    sample_prompts: Annotated[
        tuple[str, ...], Key(maxItems=8, items={"minLength": 1, "maxLength": 4096})
    ] = ()
    """Prompts that the model continues, or answers if data.conversations is true, at each
    validation. The texts are events of the run. The layout must not split the model."""
    init_from: Annotated[str | None, Key(minLength=1, maxLength=4096)] = None
    """Source of a new run's initial weights: a run folder, a checkpoint
    (runs/first/checkpoints/step-00000500, s3://bucket/prefix/first/step-00000500), a Hugging Face
    folder, hf://owner/name[@revision] on the Hub, or an NxD Core checkpoint. A run that already has
    a checkpoint resumes from it instead."""
    activation_checkpointing: Annotated[str, Key(default=None, enum=["none", "selective", "full"])]
    """Activations of a block that are recomputed in the backward pass instead of stored: none,
    selective (all except matmul and attention outputs) or full (all except the block's input).
    Defaults to the first of these that fits in memory."""
    activation_memory_budget: Annotated[float | None, Key(minimum=0, maximum=1)] = None
    """Fraction of its activations that a compiled block stores, as in torch's setting of the same
    name. A lower fraction needs less memory. The compiler selects what to recompute, cheapest
    first. Requires train.activation_checkpointing selective and train.compile. Null means no
    budget."""
    compile: Annotated[bool, Key(default=None)]
    """Whether to compile blocks with torch.compile. Defaults to true on accelerators. On CPUs,
    defaults to true only if the run is long enough for compilation to pay off."""
    # Whether a run only compiles. `make compile` sets this for a separate three-step run that saves
    # nothing. The field has no docstring, which keeps it out of schema/.
    compile_only: bool = False
    document_mask: bool = False
    """Whether attention is limited to a single document if several are packed into a sequence.
    Positions then restart at each document's first token. If false, a token attends to everything
    before it in the sequence."""
    profile_steps: Annotated[
        str | None, Key(unit="steps", pattern="^[1-9][0-9]{0,8}-[1-9][0-9]{0,8}$", examples=["4-6"])
    ] = None
    """Range of steps that torch's profiler records on rank 0, such as 4-6. The summary and trace
    are written to profile/ in the run folder. `make profile` does this in a separate short run.
    Null means no profiling."""
    parallelism: Annotated[
        Layout, Key(type=["object", "string"], pattern="^auto$", examples=["auto"])
    ]
    """Degrees of parallelism other than data parallelism. Their product must divide the world size.
    `auto`, or null for a single degree, selects the layout predicted to be fastest among those that
    fit in device memory, or a simpler one within 5 % of it. `make plan` shows the reason."""

    @property
    def recomputation(self) -> str | float:
        """Returns the recomputation mode, or the fraction of activations that blocks store if a
        budget is set.
        """
        budget = self.activation_memory_budget
        return self.activation_checkpointing if budget is None else budget


@dataclass(frozen=True)
class Checkpoint:
    """Keys of checkpoint."""

    every: Annotated[
        int | str,
        Key(
            unit="steps",
            minimum=1,
            maximum=1_000_000_000,
            pattern=r"^([1-9][0-9]{0,5}(\.[0-9]{1,3})? ?min|auto|never)$",
            examples=[100, "15 min", "auto", "never"],
        ),
    ] = 100
    """Interval between checkpoints, in steps or as a time such as `15 min`. `auto` selects the
    interval that loses the least time, based on the cost of a checkpoint and the failure rate of
    fleets of this size. `never` saves no checkpoint, even after the last step, and is meant for
    benchmarks."""
    keep: Annotated[int, Key(unit="checkpoints", minimum=1, maximum=1_000_000)] = 2
    """Number of most recent checkpoints to keep."""
    keep_every: Annotated[int | None, Key(unit="steps", minimum=1, maximum=1_000_000_000)] = None
    """Interval of permanent checkpoints. The first checkpoint at or after each multiple of this
    many steps is never deleted. Null means none."""
    on_failure: Annotated[str, Key(enum=["continue", "stop"])] = "continue"
    """What to do if a checkpoint can't be written, for example because of a full disk or an I/O
    error. `continue` logs a warning and retries at the next checkpoint. `stop` ends the run. The
    last checkpoint must be written in either case."""
    path: Annotated[
        str | None,
        Key(
            pattern="^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?|[^:]+)$",
            maxLength=1024,
            examples=["/fsx/checkpoints", "s3://bucket/checkpoints"],
        ),
    ] = None
    """Location of checkpoints: a folder that every node can access, or s3://bucket/prefix.
    Checkpoints are in a subfolder with the run's name. Defaults to the run's folder."""
    export_hf: bool = False
    """Whether a finished run also exports its model as a Hugging Face folder to
    runs/<name>/huggingface/step-<8 digits>, as `make export` does."""

    @property
    def is_off(self) -> bool:
        """Returns whether checkpoints are turned off."""
        return self.every == "never"

    @property
    def every_steps(self) -> int:
        """Returns the number of steps between checkpoints, or 0 if the interval is not in steps."""
        return self.every if isinstance(self.every, int) else 0

    @property
    def every_seconds(self) -> float:
        """Returns the number of seconds between checkpoints, or 0 if the interval is not a time.

        goodput.py replaces `auto` before this property is read.
        """
        return (
            0.0
            if isinstance(self.every, int) or self.every in ("auto", "never")
            else 60.0 * float(self.every.removesuffix("min"))
        )


@dataclass(frozen=True)
class BudgetConfig:
    """Keys of budget."""

    max_usd: Annotated[
        float | None, Key(unit="US dollars", minimum=0.001, maximum=1_000_000_000)
    ] = None
    """Cost limit of the run. A run is refused if its estimate, including setup and idle nodes,
    exceeds the limit. A run that reaches the limit saves and stops. Null means no limit."""
