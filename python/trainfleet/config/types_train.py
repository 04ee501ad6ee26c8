"""The keys of a run: its data, model, training, layout, checkpoints and budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from .families import FAMILIES, PRESETS
from .key import NAME, OWN_FILE, S3, Key
from .optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Source:
    """One entry of data.sources that is more than a path."""

    path: Annotated[str, Key(minLength=1, maxLength=4096)]
    """The path, like a plain entry."""
    weight: Annotated[float | None, Key(minimum=1e-09, maximum=1_000_000_000)] = None
    """This source's share of the training samples, relative to the others. Set it for all sources
    or for none. Without weights, each source counts by its tokens."""
    text_field: Annotated[str | None, Key(minLength=1, maxLength=255)] = None
    """The field with the text in this source's records. Null: data.text_field."""


@dataclass(frozen=True)
class Data:
    """The keys of data."""

    name: Annotated[str, Key(pattern=NAME)] = "stdlib"
    """The dataset's name. Its folder is data/<name>. Runs with the same data.name share one
    dataset."""
    sources: Annotated[
        tuple[str | Source, ...],
        Key(minItems=1, maxItems=10_000, items={"minLength": 1, "maxLength": 4096}),
    ] = ("stdlib",)
    """The location of the text: files, folders, globs and s3:// prefixes (.txt, .md, .py, .jsonl,
    .json, .csv, .tsv, .parquet, .arrow, .tar; the first four also as .gz and .zst),
    hf://owner/name[@revision][/config][:split] for a Hugging Face dataset, or `stdlib`, the Python
    files of this interpreter's standard library. An entry may be {path, weight, text_field}, with
    its share of the samples and its own text field."""
    text_field: Annotated[str, Key(minLength=1, maxLength=255)] = "text"
    """The field of a .jsonl record, or the column of a table, with the text."""
    tokenizer: Annotated[str, Key(minLength=1, maxLength=4096)] = "bpe"
    """`bpe` trains a byte-level BPE on the data. Any other value is a path: a tokenizer.json, a
    Hugging Face folder (or hf://owner/name on the Hub), a SentencePiece tokenizer.model or a
    WordPiece vocab.txt."""
    vocab_size: Annotated[int, Key(unit="tokens", minimum=300, maximum=1_000_000)] = 4096
    """The number of tokens of the trained tokenizer; ignored if data.tokenizer is a path."""
    validation_fraction: Annotated[float, Key(unit="fraction", minimum=1e-06, maximum=0.5)] = 0.01
    """The fraction of the documents for validation, chosen by the hash of their text; of a few
    plain texts, the last part of each."""
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
    record without the text field). stop: fail at the first one. skip: skip at most one in 10,000,
    rounded up. A number is the largest share that may be skipped. manifest.json counts and lists
    them; a damaged file is always an error."""
    tokenized_path: Annotated[
        str | None, Key(pattern=S3, maxLength=1024, examples=["s3://my-bucket/datasets"])
    ] = None
    """The location of the dataset: s3://bucket/prefix, in a folder with the dataset's name. Null:
    data/<name>, on a file system that all nodes share."""
    tokenize_instance_type: Annotated[
        str | None, Key(backends=["batch"], maxLength=64, examples=["c7i.8xlarge"])
    ] = None
    """The EC2 type of a single machine that tokenizes instead of the fleet: x86 processors, no
    accelerators. `make setup` creates a queue and an environment for it; the machine starts and
    ends with the job. Null: the fleet's machines."""
    shuffle_window_mib: Annotated[int | None, Key(unit="MiB", minimum=16, maximum=1_048_576)] = None
    """The size of the window from which samples are drawn at random. Its blocks are drawn at random
    from the whole dataset, so that disk or S3 is read in large pieces. Null: the whole dataset, or
    1024 if data.tokenized_path is in S3."""

    @property
    def mixture(self) -> tuple[Source, ...]:
        """Returns every source in full, including those given only as a path."""
        return tuple(Source(part) if isinstance(part, str) else part for part in self.sources)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Returns the sources' weights; None without weights, so that each source counts by its
        tokens.
        """
        given = [source.weight for source in self.mixture if source.weight is not None]
        return tuple(given) if given and len(given) == len(self.sources) else None

    def text_field_of(self, source: int) -> str:
        """Returns the field that has the text in one source's records."""
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
    """A known shape, or the config.json of a Hugging Face folder (a path with a slash) or of
    hf://owner/name[@revision] on the Hub."""
    family: Annotated[str, Key(default=None, enum=FAMILIES)]
    """The architecture: llama, mistral, qwen2, qwen3, olmo2, gemma, phi3 and gpt2 predict the next
    token; bert and roberta predict masked tokens (bert also whether one text follows the other).
    Null: the preset's."""
    layers: Annotated[int, Key(default=None, unit="blocks", minimum=1, maximum=1000)]
    """Transformer blocks. Null: the preset's."""
    hidden_size: Annotated[int, Key(default=None, unit="features", minimum=8, maximum=131_072)]
    """Width of the residual stream. Null: the preset's."""
    heads: Annotated[int, Key(default=None, unit="heads", minimum=1, maximum=1024)]
    """Attention heads. Null: the preset's."""
    kv_heads: Annotated[int, Key(default=None, unit="heads", minimum=1, maximum=1024)]
    """Key and value heads (llama's grouped-query attention); must divide heads. Null: the preset's,
    or as many as heads."""
    head_dim: Annotated[int | None, Key(unit="features", minimum=2, maximum=1024)] = field(
        kw_only=True, default=None
    )
    """Features of a head, in the families with rotary positions. Null: the preset's, or hidden_size
    / heads."""
    module: Annotated[
        str | None, Key(pattern=OWN_FILE + r"_model\.py$", maxLength=200, examples=["my_model.py"])
    ] = field(kw_only=True, default=None)
    """Your Python file, in the folder where make runs, with a class Model that replaces the network
    of model.family: docs/how-to/own-model.md. Memory and time are estimated as for the family.
    Null: the family's network."""
    intermediate_size: Annotated[
        int, Key(default=None, unit="features", minimum=8, maximum=1_000_000)
    ]
    """Width of the feed-forward layer. Null: the preset's."""
    vocab_size: Annotated[int, Key(default=None, unit="tokens", minimum=2, maximum=2_000_000)]
    """Rows of the embedding. Null: the tokenizer's size, rounded up to a multiple of 64."""
    max_position_embeddings: Annotated[
        int, Key(default=None, unit="tokens", minimum=2, maximum=10_000_000)
    ]
    """The longest sequence that the model supports. Null: the preset's."""
    rope_theta: Annotated[float, Key(default=None, minimum=1, maximum=1_000_000_000_000)]
    """Base of llama's rotary position embedding. Null: the preset's."""
    norm_eps: Annotated[float, Key(default=None, minimum=1e-15, maximum=0.1)]
    """The epsilon of the norms. Null: the preset's, or the family's."""
    tie_word_embeddings: Annotated[bool, Key(default=None)]
    """Whether the output layer shares the embedding's weights. Null: the preset's."""
    rope_scaling: Annotated[
        float, Key(default=None, unit="factor", minimum=1, maximum=1_000_000)
    ] = 1.0
    """The factor by which low RoPE frequencies are divided for a longer context, as in Llama 3.1.
    1: no scaling. Null: the preset's."""
    dropout: Annotated[float, Key(default=None, unit="fraction", minimum=0, exclusiveMaximum=1)] = (
        0.0
    )
    """The fraction of activations and attention weights dropped in training; llama has none. Null:
    the preset's, or the family's."""

    @property
    def head_features(self) -> int:
        """Returns the features of one head."""
        return self.head_dim or self.hidden_size // self.heads


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The keys of train.parallelism."""

    fsdp: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1_048_576)]
    """Ranks over which the optimizer's state, weights and gradients are sharded; they train on
    different sequences. Null: chosen from one (no sharding), the ranks of a node, or all."""
    tensor: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1024)]
    """Ranks over which each matrix is split. Null: chosen, within a node."""
    pipeline: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1024)]
    """Number of pipeline stages. Null: as few as fit."""
    context: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=1024)]
    """Ranks over which each sequence is split. Null: 1."""
    zero_stage: Annotated[int, Key(default=None, enum=[1, 3])] = 3
    """The sharded parts: 1, only the optimizer's state (ZeRO 1: less traffic); 3, also weights and
    gradients (less memory). Null: chosen."""
    virtual_stages: Annotated[int, Key(default=None, unit="stages", minimum=1, maximum=64)] = 1
    """Stages per pipeline rank. 1: the 1F1B schedule. More: the interleaved schedule, with less
    idle time and more communication. Null: chosen."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """The keys of train."""

    steps: Annotated[int, Key(unit="steps", minimum=1, maximum=1_000_000_000)] = 500
    """Optimizer steps. Raise it to continue a finished run."""
    global_batch_size: Annotated[int, Key(unit="sequences", minimum=1, maximum=1_000_000)] = 16
    """Sequences in one optimizer step, over all ranks. It does not depend on the number of
    nodes."""
    micro_batch_size: Annotated[
        int, Key(default=None, unit="sequences", minimum=1, maximum=1_000_000)
    ]
    """Sequences per rank in one forward pass; gradients are accumulated over as many passes as
    needed. Null: the largest that divides the rank's part and fits."""
    sequence_length: Annotated[int, Key(unit="tokens", minimum=2, maximum=10_000_000)] = 256
    """Tokens in a sequence."""
    learning_rate: Annotated[float, Key(minimum=1e-12, maximum=1)] = 0.003
    """Peak learning rate."""
    min_lr_ratio: Annotated[float, Key(unit="fraction", minimum=0, maximum=1)] = 0.1
    """The final learning rate, as a fraction of train.learning_rate."""
    optimizer: Annotated[str, Key(enum=OPTIMIZERS)] = "adamw"
    """adamw; lamb, which scales each matrix's update to the size of the matrix, for very large
    batches; muon, which orthogonalizes the update of each matrix in a block (embeddings, norms and
    the output layer use AdamW)."""
    schedule: Annotated[str, Key(enum=["cosine", "linear", "polynomial", "wsd"])] = "cosine"
    """How the learning rate decays after the warm-up: cosine, linear, polynomial (of
    train.schedule_power), or wsd, which keeps it constant and decays to the floor in the last
    train.decay_steps."""
    schedule_steps: Annotated[
        int, Key(default=None, unit="steps", minimum=1, maximum=1_000_000_000)
    ]
    """The length of the schedule. Null: train.steps. If it is longer, the run ends before the rate
    reaches its floor."""
    schedule_power: Annotated[float, Key(minimum=0.001, maximum=10)] = 1.0
    """The power of the polynomial schedule; 1 is a straight line."""
    decay_steps: Annotated[int, Key(default=None, unit="steps", minimum=1, maximum=1_000_000_000)]
    """Steps over which the wsd schedule decays to its floor. Null: a fifth of
    train.schedule_steps."""
    warmup_steps: Annotated[int, Key(default=None, unit="steps", minimum=0, maximum=1_000_000_000)]
    """Steps of linear warm-up. Null: 5 % of train.steps, at most 2000."""
    weight_decay: Annotated[float, Key(minimum=0, maximum=10)] = 0.1
    """Decoupled weight decay, on matrices only."""
    beta1: Annotated[float, Key(minimum=0, exclusiveMaximum=1)] = 0.9
    """The optimizer's first moment decay."""
    beta2: Annotated[float, Key(minimum=0, exclusiveMaximum=1)] = 0.95
    """The optimizer's second moment decay."""
    epsilon: Annotated[float, Key(minimum=1e-30, maximum=1)] = 1e-08
    """Added to the square root of the second moment."""
    gradient_clip: Annotated[float, Key(minimum=0, maximum=1_000_000_000)] = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    spike_sigmas: Annotated[
        float, Key(unit="standard deviations", minimum=0, maximum=1_000_000_000)
    ] = 6
    """A step is skipped if its loss or gradient norm is more than this many standard deviations
    above the mean of the last 128 steps. 0: only if one of them is not finite."""
    max_consecutive_skips: Annotated[int, Key(unit="steps", minimum=1, maximum=1_000_000)] = 10
    """The run stops with an error after this many skipped steps in a row."""
    precision: Annotated[str, Key(enum=["auto", "fp32", "bf16", "fp16", "fp8"])] = "auto"
    """Number format of the forward and backward pass. auto: bf16 if every rank's device has bf16
    instructions (GPUs since Ampere, Trainium) or is faster with it (CPUs, by a trial that make plan
    shows). Otherwise fp16 on GPUs of Volta and Turing (V100), else fp32. In fp32, losses agree to
    1e-6 over any number of ranks; in bf16 and fp16 only within their rounding. fp16: weights and
    moments stay fp32, the loss is scaled by a dynamic factor, and all ranks skip a step with
    overflowing gradients (metrics: loss_scale, overflowed; not yet run on a GPU, and on most CPUs
    ten times slower than bf16). fp8: bf16, with the matrix products of blocks in fp8 (GPUs since
    Ada and Hopper; needs torchao, the extra fp8; not yet run on a GPU)."""
    param_dtype: Annotated[str, Key(enum=["fp32", "bf16"])] = "fp32"
    """Number format of the weights, their gradients and the optimizer's moments. bf16 halves their
    memory and requires train.precision bf16 and train.optimizer adamw. Numbers are rounded
    stochastically so that small updates add up. The loss ends slightly higher than with fp32."""
    seed: Annotated[int, Key(minimum=0, maximum=2_147_483_647)] = 1
    """The seed of the initial weights and of the order of the samples."""
    log_every: Annotated[int, Key(unit="steps", minimum=1, maximum=1_000_000_000)] = 10
    """Steps between two lines of metrics."""
    loggers: Annotated[
        tuple[str, ...],
        Key(maxItems=3, uniqueItems=True, items={"enum": ["wandb", "mlflow", "trackio"]}),
    ] = ()
    """Services that also get every line of metrics: wandb, mlflow, trackio. Each needs its package
    (pip install wandb) and its environment variables, such as WANDB_API_KEY in fleet.secrets or
    WANDB_MODE=offline. A service that fails never stops a run."""
    callback: Annotated[
        str | None,
        Key(pattern=OWN_FILE + r"_callback\.py$", maxLength=200, examples=["my_callback.py"]),
    ] = None
    """Your Python file, in the folder where make runs. Every rank calls its function
    after_step(step, trainer) after each optimizer step: docs/how-to/own-model.md. Null: none."""
    validate_every: Annotated[int, Key(unit="steps", minimum=0, maximum=1_000_000_000)] = 100
    """Steps between two validations; the last step is always validated. 0: only the last step."""
    validation_sequences: Annotated[
        int, Key(unit="sequences", minimum=1, maximum=1_000_000_000)
    ] = 64
    """Sequences in one validation, at most those of the validation split."""
    init_from: Annotated[str | None, Key(minLength=1, maxLength=4096)] = None
    """The weights with which a new run starts: a run's folder, a checkpoint
    (runs/first/checkpoints/step-00000500, s3://bucket/prefix/first/step-00000500), a Hugging Face
    folder, hf://owner/name[@revision] on the Hub, or a checkpoint of NxD Core. A run with a
    checkpoint resumes from that instead."""
    activation_checkpointing: Annotated[str, Key(default=None, enum=["none", "selective", "full"])]
    """Which activations of a block are recomputed in the backward pass instead of kept: none,
    selective (all except matrix products and attention), full (all except its input). Null: the
    least of the three that fits."""
    activation_memory_budget: Annotated[float | None, Key(minimum=0, maximum=1)] = None
    """The share of its activations that a compiled block keeps, like torch's setting of that name.
    A lower share needs less memory. The compiler selects what to recompute, the cheapest first. It
    needs train.activation_checkpointing selective and train.compile. Null: no budget."""
    compile: Annotated[bool, Key(default=None)]
    """Whether blocks are compiled (torch.compile). Null: always on accelerators; on CPUs if the run
    is long enough for it to pay off."""
    # Whether a run only compiles. `make compile` sets it for a separate run of three steps that
    # keeps nothing. Without a docstring, the key is not in schema/.
    compile_only: bool = False
    document_mask: bool = False
    """Whether attention stays within a document if several are packed into one sequence. Positions
    are then counted from each document's first token. Otherwise a token attends to everything
    before it in its sequence."""
    profile_steps: Annotated[
        str | None, Key(unit="steps", pattern="^[1-9][0-9]{0,8}-[1-9][0-9]{0,8}$", examples=["4-6"])
    ] = None
    """The steps that torch's profiler records on rank 0, such as 4-6. The summary and the trace are
    written to profile/ in the run folder (`make profile` does it in a separate short run). Null:
    none."""
    parallelism: Annotated[
        Layout, Key(type=["object", "string"], pattern="^auto$", examples=["auto"])
    ]
    """Degrees of parallelism besides data parallelism; their product divides the world size.
    `auto`, or null for a degree: the layout predicted to be fastest among those that fit the
    device's memory, or a simpler one within 5 % of it; `make plan` shows the reason."""

    @property
    def recomputation(self) -> str | float:
        """Returns the name of the recomputation mode; with a budget, the share of activations that
        blocks keep.
        """
        budget = self.activation_memory_budget
        return self.activation_checkpointing if budget is None else budget


@dataclass(frozen=True)
class Checkpoint:
    """The keys of checkpoint."""

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
    """Steps between two checkpoints, or a time: `15 min`. auto: the interval that loses the least
    time, from the cost of a checkpoint and the failure rate of fleets of this size. never: no
    checkpoint even after the last step, for benchmarks."""
    keep: Annotated[int, Key(unit="checkpoints", minimum=1, maximum=1_000_000)] = 2
    """The number of newest checkpoints to keep."""
    keep_every: Annotated[int | None, Key(unit="steps", minimum=1, maximum=1_000_000_000)] = None
    """The first checkpoint at or after each multiple of this many steps is kept permanently. Null:
    none."""
    on_failure: Annotated[str, Key(enum=["continue", "stop"])] = "continue"
    """What to do if a checkpoint can't be written (a full disk, an I/O error): continue training
    with a warning and try again at the next one, or stop the run. The last checkpoint must be
    written in either case."""
    path: Annotated[
        str | None,
        Key(
            pattern="^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?|[^:]+)$",
            maxLength=1024,
            examples=["/fsx/checkpoints", "s3://bucket/checkpoints"],
        ),
    ] = None
    """The location of checkpoints, in a folder with the run's name: a folder that every node sees,
    or s3://bucket/prefix. Null: the run's folder."""
    export_hf: bool = False
    """Whether a finished run also exports its model as a Hugging Face folder,
    runs/<name>/huggingface/step-<8 digits>, like `make export`."""

    @property
    def is_off(self) -> bool:
        """Returns whether no checkpoint is saved."""
        return self.every == "never"

    @property
    def every_steps(self) -> int:
        """Returns the steps between checkpoints; 0 if the interval is not in steps."""
        return self.every if isinstance(self.every, int) else 0

    @property
    def every_seconds(self) -> float:
        """Returns the seconds between checkpoints; 0 if the interval is not a time. goodput.py
        replaces `auto` before this is used.
        """
        return (
            0.0
            if isinstance(self.every, int) or self.every in ("auto", "never")
            else 60.0 * float(self.every.removesuffix("min"))
        )


@dataclass(frozen=True)
class BudgetConfig:
    """The keys of budget."""

    max_usd: Annotated[
        float | None, Key(unit="US dollars", minimum=0.001, maximum=1_000_000_000)
    ] = None
    """The cost limit. A run is refused if its estimate, including setup and idle nodes, is higher.
    A run that has cost this much saves and stops. Null: no limit."""
