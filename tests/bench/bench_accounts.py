"""The arithmetic of memory against published figures, by each engine's own accounts (accounts.py).

    PYTHONPATH=python python tests/bench/bench_accounts.py [--rows FILE] [--worst N]

A line a class of runs: the errors of rows whose memory was published; then which runs that did not fit are foreseen, and how many
that ran would have been refused. `--rows FILE` judges other rows of published.jsonl's form.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from accounts import Case, Engine, Shape, bytes_of

from trainfleet.config.limits import USABLE
from trainfleet.hardware import accelerators

ROWS = Path(__file__).parent / "published.jsonl"
GIB = 2**30
TITAN = Engine(
    weights=4,
    gradients=4,
    optimizer=8,
    zero=3,
    gathered=2,
    logits=14,
    sliced=4,
    halves=True,
    regathers=False,
    buffers=2,
    met="reserved",
)
# fp16 and its fp32 copies over ZeRO 1's ranks; BF16_Optimizer keeps bf16 gradients and their fp32 sums whole, and does the rest as ZeRO 1
FP16 = Engine(2, 2, 16, zero=1, scores=True, dropout=True, buffers=2, met="device")
BF16 = replace(FP16, gradients=6, optimizer=12)
NEMO = Engine(gradients=2, zero=1, parts=3)
# its states are bf16 as its weights, and FSDP2's whole sums are fp32 (KempnerForge, distributed/parallel.py; torch, _fsdp_param.py)
KEMPNER = Engine(2, 4, 4, zero=3, gathered=2, logits=6, accumulates=True, joined=True)
# torch's Adam on one flat part in fp32: its gradient, and two copies of the second moment on the way to its root (single tensor)
FLAT = Engine(2, 2, 12, stepping=12)
PLAIN = Engine(scores=True, dropout=True)  # Megatron-LM without flash attention, by its defaults
OTHERS = Engine(weights=4, gradients=4, optimizer=8, zero=3, gathered=2)  # FSDP as torch has it
ENGINES = (  # words in a row's source, class, accounts
    ("Korthikanti", "Megatron-LM, as drawn", Engine(scores=True, dropout=True, analytic=True)),
    ("bigscience", "Megatron-DeepSpeed, fp16", FP16),
    ("torchtitan:benchmarks/llama3_h100_202412", "torchtitan, 2024", TITAN),
    ("torchtitan", "torchtitan, loss compiled", replace(TITAN, logits=6)),
    ("nanotron", "nanotron", Engine(zero=1, logits=8, copies=3, regathers=False, stages="by cost")),
    ("torchtune:README.md optimization", "torchtune", Engine(weights=2, gradients=2, optimizer=4)),
    ("KempnerForge", "KempnerForge", KEMPNER),
    ("pytorch/ao", "torchtitan, loss compiled", replace(TITAN, logits=6)),
    ("InternEvo", "flat Adam of torch", FLAT),
    ("LlamaFactory", "flat Adam of torch", FLAT),
    ("dgxc", "NeMo", NEMO),
    ("nemo", "NeMo", NEMO),
    ("llm-foundry", "llm-foundry", replace(OTHERS, logits=4)),
    ("neuron", "Neuron", Engine(zero=1, scores=True)),
    ("colossal", "ColossalAI", Engine(zero=1)),
)  # fmt: skip
SHAPES = {  # words in a row's id, of models whose rows tell none
    "nanotron-1b": Shape(
        24, 2048, 32, 32, 4096, 50257, tied=True
    ),  # huggingface/bench_cluster, create_configs.py
    "52b": Shape(
        64, 8192, 32, 32, 32768, 50257, gated=False, tied=True
    ),  # bigscience, experiments/gpt2.md
    "torchtune-3b": Shape(28, 3072, 24, 8, 8192, 128256, tied=True),  # Llama 3.2 3B's config.json
}
LADDER = (  # torchtune's options, each row with those before: words in a row's id, what they change of the accounts
    ("packed", {}),
    ("compile", {"parts": 2}),  # gate and up; what they make is computed again
    ("chunked", {"logits": 12 / 8}),
    ("-ac", {}),
    ("opt-in-bwd", {"gradients": 0}),
    ("offload", {"offloaded": True}),
    ("8bit", {"optimizer": 2}),
)
UNTOLD = ("baseline", "torchtune-full")  # tokens, and what is on the host, are not
CAPACITY = {  # GiB that torch or the runtime reports, which is a hundredth less than the name says
    "H100-96GB": 95,
    "V100-16GB": 15.78,
    "V100": accelerators.BY_NAME["V100-32GB"].memory_gib,
    "A10G": accelerators.BY_NAME["A10G-24GB"].memory_gib,
    "L40S": accelerators.BY_NAME["L40S-48GB"].memory_gib,
    "RTX 6000 Ada": 47.48,
    "A100-40GB": accelerators.BY_NAME["A100-40GB"].memory_gib,
    "A100": accelerators.BY_NAME["A100-80GB"].memory_gib,
    "H100": accelerators.BY_NAME["H100-80GB"].memory_gib,
    "H200": accelerators.BY_NAME["H200-141GB"].memory_gib,
    "GB200": 184,
    "B200": accelerators.BY_NAME["B200-180GB"].memory_gib,
    "trn1": accelerators.BY_NAME["NeuronCore-v2"].memory_gib,
}
GATED = ("llama", "mistral", "qwen", "mixtral")


def engine_of(row: dict[str, Any]) -> tuple[str, Engine]:
    """The class of a row, and its accounts; those of plain engines where no class is known."""
    found = next(
        (
            (name, engine)
            for words, name, engine in ENGINES
            if words.lower() in row["source"].lower()
        ),
        None,
    )
    step = max((place for place, (words, _) in enumerate(LADDER) if words in row["id"]), default=-1)
    if found and found[1] is FP16:
        half, rebalanced = "bf16" not in (row["precision"] or ""), _has_embeddings_as_blocks(row)
        if half and not rebalanced:
            return found
        # its notes: fp32 sums of bf16 gradients came a day after the stages that have as many blocks and embeddings
        summed = rebalanced and "2022-02-27" not in row["source"]
        stages = "blocks and embeddings" if rebalanced else "blocks"
        return "Megatron-DeepSpeed on A100", replace(BF16 if summed else FP16, stages=stages)
    if "no flash attention" in (row.get("note") or ""):
        return "Megatron-LM, scores kept", PLAIN
    if found is None or found[0] != "torchtune":
        return found or ("others", OTHERS if row["layout"].get("fsdp") else Engine())
    return found[0], replace(
        found[1],
        **{key: value for _, changes in LADDER[: step + 1] for key, value in changes.items()},
    )


def _has_embeddings_as_blocks(row: dict[str, Any]) -> bool:
    """Whether its stages count an embedding as a block: its numbers of layers then are two less than stages divide."""
    layers, stages = row["model"].get("layers") or 0, row["layout"].get("pp") or 1
    return stages > 1 and layers % stages != 0 and (layers + 2) % stages == 0


def shape_of(row: dict[str, Any]) -> Shape | None:
    model = row["model"]
    if all(model.get(key) for key in ("layers", "hidden", "heads", "ffn")):
        gated = any(word in (model.get("family") or "").lower() for word in GATED)
        heads, vocabulary = model.get("kv_heads") or model["heads"], model.get("vocab") or 50304
        return Shape(
            model["layers"],
            model["hidden"],
            model["heads"],
            heads,
            model["ffn"],
            vocabulary,
            gated,
            not gated,
        )
    return next((shape for words, shape in SHAPES.items() if words in row["id"]), None)


def case_of(row: dict[str, Any]) -> Case | None:
    layout, shape = row["layout"], shape_of(row)
    if shape is None or not layout or not row["seq"] or not row["devices"]:
        return None
    tensor, pipeline, context = (layout.get(name) or 1 for name in ("tp", "pp", "cp"))
    data = layout.get("dp") or max(1, row["devices"] // (tensor * pipeline * context))
    micro = row["micro_batch"] or 1
    batch = row["global_batch_sequences"] or micro * data
    if pipeline > 1 and "torchtitan" in row["source"]:
        micro = max(
            1, micro // pipeline
        )  # its local batch is cut into as many micro-batches as there are stages
    zero = 3 if "zero3" in row["source"] else layout.get("zero") or 0
    divided = (
        layout.get("sp") is not False or "zero3" in row["source"]
    )  # its settings divide what recomputation keeps
    told = row["activation_checkpointing"] or ("full" if "bigscience" in row["source"] else "none")
    recompute = next((name for name in ("full", "selective") if str(told).startswith(name)), "none")
    return Case(
        shape, row["seq"], micro, max(1, batch // (data * micro)), data, data * context, zero, tensor, pipeline,
        context, layout.get("vpp") or (2 if "interleaved" in row["id"] else 1), recompute, divided,
        bool(row["compile"]),
    )  # fmt: skip


def report(name: str, errors: list[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    tenth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return f"{name:24} {len(sizes):4} rows  median {statistics.median(sizes):6.1%}  p90 {tenth:6.1%}  bias {statistics.median(errors):+6.1%}"


def fullness(row: dict[str, Any], case: Case, engine: Engine) -> float | None:
    """What the run would take of its device's memory, where that is known: above 1 it is refused, above USABLE warned of."""
    capacity = next(
        (size for words, size in CAPACITY.items() if words in (row["hardware"] or "")), None
    )
    return (
        None if capacity is None else bytes_of(case, replace(engine, met="device")) / GIB / capacity
    )


def ran_out(row: dict[str, Any]) -> bool:
    words = f"{row['kind']} {row.get('note') or ''}".lower()
    return any(word in words for word in ("oom", "out of memory", "out-of-memory"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--worst", type=int, default=0)
    told = parser.parse_args()
    found: dict[str, list[tuple[float, str]]] = {}
    full: dict[bool, list[float]] = {True: [], False: []}
    for row in map(json.loads, told.rows.read_text().splitlines()):
        named, case = engine_of(row), case_of(row)
        if case is None or any(word in row["id"] for word in UNTOLD):
            continue
        if measured := row["measured"].get("memory_gib"):
            said = bytes_of(case, named[1]) / GIB
            found.setdefault(named[0], []).append(
                (said / measured - 1, f"{row['id']}: {said:.1f} for {measured:.1f} GiB")
            )
        if (row["kind"] == "train" or ran_out(row)) and (
            part := fullness(row, case, named[1])
        ) is not None:
            full[ran_out(row)].append(part)
    for name, each in found.items():
        print(report(name, [error for error, _ in each]))
    print(report("all", [error for each in found.values() for error, _ in each]))
    for parts, what in ((full[False], "runs that ran"), (full[True], "that ran out of memory")):
        no, tight = sum(part > 1 for part in parts), sum(USABLE < part <= 1 for part in parts)
        print(f"of {len(parts)} {what} {no} would have been refused, {tight} more warned of")
    for error, line in sorted(
        (pair for each in found.values() for pair in each), key=lambda pair: -abs(pair[0])
    )[: told.worst]:
        print(f"{error:+.1%} {line}")


if __name__ == "__main__":
    main()
