"""Fits the constants of config/speed.py to published figures, and judges them on sources they were not fitted to.

`python tests/bench/fit_planner.py` leaves each source of published.jsonl out in turn, fits on the others, and prints the errors on the
one left out; then it prints the constants fitted on all. `--rows FILE` judges the constants as they stand on other rows of that form.
`--ranges` fits plan/estimate.py's spread to the errors on sources left out, and counts how many errors of yet another source it covers.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from dataclasses import fields, replace
from itertools import combinations
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from trainfleet.config import speed
from trainfleet.config.step_work import Constants, DeviceSpeed, Work
from trainfleet.hardware import accelerators, node_types

ROWS = Path(__file__).parent / "published.jsonl"
GB = 1e9
FREE = [field.name for field in fields(Constants)]
KINDS = ("ampere", "hopper", "hopper500", "blackwell", "neuron")
START = {
    "ampere": (0.80, 0.5),
    "hopper": (0.74, 0.35),
    "hopper500": (0.58, 0.4),
    "blackwell": (0.54, 0.4),
    "neuron": (0.65, 0.5),
}


def _device(row: node_types.Accelerator, outside: float, node: int, domain: int = 0) -> DeviceSpeed:
    flops = {
        format: row.peak(format)
        for format in ("fp8", "bf16", "fp32")
        if format == "fp32" or getattr(row, format)
    }
    return DeviceSpeed(
        row.name,
        flops,
        row.bandwidth,
        row.neighbours,
        outside,
        node,
        1.0,
        1.0,
        row.kind != "neuron",
        domain,
        side=row.side,
    )


ROCE, INFINIBAND = 25 * GB, 50 * GB  # bytes/s of a rank's network, as the sources tell
# Of a B200 in a GB200 NVL72 (1,200 W), as against one of HGX (1,000 W): NVIDIA's data sheet of both
RACK: dict[str, Any] = {"flops": {"fp8": 5000e12, "bf16": 2500e12, "fp32": 1250e12}, "memory": 8e12}
EXP = (
    accelerators.BY_NAME["B300-288GB"].attention / accelerators.BY_NAME["B200-180GB"].attention
)  # of attention, over that of B200


def _powered(times: float) -> float:
    """Speed under so many times the power: as H100 of 500 W are to those of 700, fitted each to their own rows (0.56 and 0.69)."""
    return times**0.62


DEVICES = [  # words in a row's hardware, family, device
    ("A100-40GB", "ampere", _device(accelerators.BY_NAME["A100-40GB"], ROCE, 8)),
    ("A100", "ampere", _device(accelerators.BY_NAME["A100-80GB"], ROCE, 8)),
    (
        "H100-96GB",
        "hopper500",
        replace(_device(accelerators.BY_NAME["H100-80GB"], INFINIBAND, 8), memory=2.4e12),
    ),  # HBM2e, 500 W
    ("H100", "hopper", _device(accelerators.BY_NAME["H100-80GB"], INFINIBAND, 8)),
    ("H200", "hopper", _device(accelerators.BY_NAME["H200-141GB"], INFINIBAND, 8)),
    (
        "GB300",
        "blackwell",
        replace(
            _device(accelerators.BY_NAME["B300-288GB"], INFINIBAND, 4, 72),
            **RACK,
            efficiency=_powered(1.4 / 1.2),
            attention=EXP,
        ),
    ),
    (
        "B300",
        "blackwell",
        replace(
            _device(accelerators.BY_NAME["B300-288GB"], INFINIBAND, 8),
            efficiency=_powered(1.1),
            attention=EXP,
        ),
    ),
    (
        "GB200",
        "blackwell",
        replace(_device(accelerators.BY_NAME["B200-180GB"], INFINIBAND, 4, 72), **RACK),
    ),
    ("B200", "blackwell", _device(accelerators.BY_NAME["B200-180GB"], INFINIBAND, 8)),
    ("trn1", "neuron", _device(accelerators.BY_NAME["NeuronCore-v2"], 3.1 * GB, 32)),
    ("trn2", "neuron", _device(accelerators.BY_NAME["NeuronCore-v3 x2"], 6.25 * GB, 64)),
    ("A10G", "ampere", _device(accelerators.BY_NAME["A10G-24GB"], 1.6 * GB, 8)),
]


# Ran before FlashAttention (arXiv:2205.14135): what their scores take goes through memory
BEFORE_FLASH = re.compile(
    r"korthikanti|narayanan|bigscience|bloom|metaseq|opt-175b|neox-20b|mt-nlg|megatron-turing|glm-130b|gist|neuron-encoder|v100"
)
MEGATRONS = re.compile(
    r"nemo|megatron(?!-llama)|bigscience"
)  # with Megatron's kernels; its LLaMA of 2023 had no Transformer Engine
BF16_SUMS = re.compile(
    r"llm-foundry|fms-fsdp"
)  # FSDP engines whose settings sum gradients in bf16; others do in fp32
SITES = {
    "bigscience": 6.25 * GB
}  # bytes/s of a rank where rows leave it out: Jean Zay has 4 Omni-Path links of 100 Gbit/s a node
RATE = re.compile(r"(?:(\d+) ?x ?)?(\d+) ?Gb(?:ps|/s|it/s)?([^,;)]*)")


def device_of(hardware: str | None, source: str = "") -> tuple[str, DeviceSpeed] | None:
    """The device that a row tells of, with the ranks of a node and the network if it tells them too."""
    told = hardware or ""
    found = next(((kind, device) for words, kind, device in DEVICES if words in told), None)
    if found is None:
        return None
    kind, device = found
    ranks = re.search(r"(\d+) ?(?:GPUs? )?(?:/|a |per )node", told)
    device = replace(device, node=int(ranks[1])) if ranks else device
    known = next((rate for words, rate in SITES.items() if words in source), device.outside)
    return kind, replace(device, outside=_network(told, device, kind == "ampere") or known)


def _network(told: str, device: DeviceSpeed, old: bool) -> float | None:
    """Bytes/s of a rank's network as a row's words have it: of a GPU, or of a node; where neither is said, A100s share it."""
    rate = RATE.search(told)
    if rate is None:
        return None
    bytes = int(rate[1] or 1) * int(rate[2]) / 8 * GB
    shared = "node" in rate[3] or (old and "GPU" not in rate[3])
    return bytes / device.node if shared else bytes


def format_of(precision: str | None) -> str:
    words = (precision or "bf16").lower()
    if "rowwise" in words:
        return "bf16"  # what its products gain, its scales cost (torchtitan's own tables)
    return "fp8" if "fp8" in words or "float8" in words else "fp32" if words == "fp32" else "bf16"


def work_of(row: dict[str, Any]) -> Work | None:
    """The row as the model takes it; None where the row lacks a shape, a batch or a layout."""
    model, layout = row["model"], row["layout"]
    if (
        not all(model.get(key) for key in ("layers", "hidden", "heads", "ffn"))
        or not row["seq"]
        or not row["devices"]
    ):
        return None
    degree = {name: layout.get(name) or 1 for name in ("tp", "pp", "cp")}
    together = degree["tp"] * degree["pp"] * degree["cp"]
    data = max(1, row["devices"] // together)
    batch = row["global_batch_sequences"]
    micro = row["micro_batch"] or 1
    if batch is None:
        batch = micro * data
    if (
        degree["pp"] > 1
        and micro * data > batch / degree["pp"]
        and row["split_source"] == "torchtitan"
    ):
        micro = 1  # torchtitan's local batch is cut into micro-batches of one
    micro = max(1, min(micro, batch // data or 1))
    passes = max(1, round(batch / data / micro))
    family = (model.get("family") or "").lower()
    nemo = (
        row["split_source"] == "dgxc" or "nemo" in row["source"].lower()
    )  # its optimizer is ZeRO 1, its gradients bf16
    shard = layout.get("fsdp") or (data if layout.get("zero") or nemo else 1)
    words, stages = row["source"].lower(), _rounds(row, nemo)
    old = _ran_before_flash(row)  # and before sequence parallelism, of the same month
    compiled = row.get("compile")
    fused = (
        bool(compiled)
        if compiled is not None
        else any(name in words for name in ("dgxc", "nvidia", "nemo", "megatron", "neuron"))
    )
    recompute = str(row["activation_checkpointing"] or "none")
    recompute = (
        "full"
        if recompute.startswith("full")
        else "selective"
        if recompute.startswith("selective")
        else "none"
    )
    return Work(
        layers=model["layers"], width=model["hidden"], inner=model["ffn"], heads=model["heads"],
        kv_heads=model.get("kv_heads") or model["heads"], vocabulary=model.get("vocab") or 50304,
        gated="llama" in family or "mistral" in family or "qwen" in family or "mixtral" in family, causal="bert" not in family,
        length=row["seq"], micro_batch=micro, passes=passes, data=data, shard=shard,
        zero=layout.get("zero") or (3 if layout.get("fsdp") else 1), tensor=degree["tp"], pipeline=degree["pp"],
        context=degree["cp"], interleave=stages, even=model["layers"] % (degree["pp"] * stages) == 0, gradient_bytes=2 if nemo or BF16_SUMS.search(words) else 4,
        format="bf16" if "trn" in row["hardware"] else format_of(row["precision"]), weight_bytes=4 if format_of(row["precision"]) == "fp32" else 2,
        recompute=recompute, tuned=row["split_source"] in ("dgxc", "korthikanti", "gist", "megascale") or bool(MEGATRONS.search(words)), flash=not old, fused=fused, sequence_parallel=not old if layout.get("sp") is None else layout["sp"],
        predicted=0.16 if "bert" in family else 1.0, state_bytes=2 if re.search("bf16 weights|bf16-true", row.get("note") or "") else 4,
    )  # fmt: skip


def _rounds(row: dict[str, Any], nemo: bool) -> int:
    """Stages that each pipeline rank has in turn; where NeMo's tables leave them out, as many as its recipes have: one a block."""
    layout, layers = row["layout"], row["model"]["layers"]
    if nemo and "vpp" not in layout and layers % (layout.get("pp") or 1) == 0:
        return int(layers // (layout.get("pp") or 1))
    return layout.get("vpp") or (
        8 if row["split_source"] == "llama3-paper" else 2 if "interleaved" in row["id"] else 1
    )


def _ran_before_flash(row: dict[str, Any]) -> bool:
    """Whether attention's scores went through memory: by the run's name, or by its date where its source tells one."""
    words = " ".join((row["split_source"], row["id"], row["hardware"] or "", row["source"])).lower()
    paper = re.search(r"arxiv[: ]*(\d{4})\.", words)
    early = bool(paper and int(paper[1]) < 2206) or bool(
        re.search(r"\b20(1\d|2[01]|22-0\d)-", words)
    )
    return (
        early
        or bool(BEFORE_FLASH.search(words))
        or (row["split_source"] == "nanogpt" and "eager" in row["id"])
    )


def measured(row: dict[str, Any], work: Work) -> float | None:
    """Tokens/s of one device as published, or from its step or its FLOP/s (the usual 6 N + attention)."""
    found, derived = row["measured"], row.get("derived") or {}
    if rate := found.get("tokens_per_second_per_device") or derived.get(
        "tokens_per_second_per_device"
    ):
        return float(rate)
    if seconds := found.get("step_seconds"):
        return work.step_tokens / seconds / work.world
    if flops := found.get("tflops_per_device"):
        numbers = work.layers * work.block_numbers + work.vocabulary * work.width
        return flops * 1e12 / (6 * numbers + 6 * work.layers * work.length * work.width)
    return None


def usable(rows: list[dict[str, Any]]) -> list[tuple[str, str, Work, str, DeviceSpeed, float]]:
    """source, id, work, device family, device, tokens/s per device."""
    found = []
    for row in rows:
        if (
            row["kind"] != "train"
            or not (device := device_of(row["hardware"], row["source"]))
            or not (work := work_of(row))
        ):
            continue
        if rate := measured(row, work):
            found.append((row["split_source"], row["id"], work, *device, rate))
    return found


def tune(device: DeviceSpeed, kind: str, efficiency: dict[str, float]) -> DeviceSpeed:
    products, attention = efficiency[kind], efficiency[f"{kind} attention"]
    return replace(
        device, efficiency=device.efficiency * products, attention=device.attention * attention
    )


def tokens_per_second(
    work: Work, device: DeviceSpeed, constants: Constants = speed.FITTED
) -> float:
    """Tokens/s of one rank, as predicted."""
    return work.step_tokens / speed.step_of(work, device, constants).total / work.world


class Model:
    """The constants as one vector of logarithms, around where they began."""

    def __init__(self) -> None:
        self.start = np.array(
            [log(getattr(Constants(), name)) for name in FREE]
            + [log(START[kind][place]) for place in (0, 1) for kind in KINDS]
        )

        rows = (
            accelerators.BY_NAME["A100-80GB"],
            accelerators.BY_NAME["H100-80GB"],
            accelerators.BY_NAME["H100-80GB"],
            accelerators.BY_NAME["B200-180GB"],
            accelerators.BY_NAME["NeuronCore-v2"],
        )
        self.given = self.start.copy()
        self.given[len(FREE) :] = [
            log(getattr(row, name)) for name in ("efficiency", "attention") for row in rows
        ]

    def unpack(self, vector: np.ndarray) -> tuple[Constants, dict[str, float]]:
        values = [exp(value) for value in vector]
        told = dict(zip(FREE, values, strict=False))
        for name in ("hidden_tensor", "hidden_shard", "ring", "ring_outside", "fp8", "full"):
            told[name] = min(told[name], 1.0)
        return Constants(**told), dict(
            zip(
                (*KINDS, *(f"{kind} attention" for kind in KINDS)), values[len(FREE) :], strict=True
            )
        )

    def errors(self, vector: np.ndarray, rows: list[Any]) -> np.ndarray:
        constants, efficiency = self.unpack(vector)
        return np.array([
            log(tokens_per_second(work, tune(device, kind, efficiency), constants) / rate)
            for _, _, work, kind, device, rate in rows
        ])  # fmt: skip

    def fit(self, rows: list[Any], rounds: int = 25, trust: float = 0.12) -> np.ndarray:
        """Robust least squares by Levenberg and Marquardt; `trust`: how far a constant may go from its start at the cost of one row."""
        counts: dict[str, int] = defaultdict(int)
        for source, *_ in rows:
            counts[source] += 1
        even = np.array(
            [counts[source] ** -0.5 for source, *_ in rows]
        )  # many rows of one source weigh as their square root
        even /= even.mean()
        vector, damping = self.start.copy(), 1.0
        error = self.errors(vector, rows)

        def cost(error: np.ndarray, vector: np.ndarray) -> float:
            return float(
                (even * np.sqrt(1 + (error / 0.15) ** 2)).sum() * 0.045
                + (((vector - self.start) / trust) ** 2).sum() * 0.045 * 0.5
            )

        best = cost(error, vector)
        for _ in range(rounds):
            slopes = np.empty((len(rows), len(vector)))
            for index in range(len(vector)):
                moved = vector.copy()
                moved[index] += 1e-4
                slopes[:, index] = (self.errors(moved, rows) - error) / 1e-4
            weight = even / np.sqrt(1 + (error / 0.15) ** 2)
            normal = slopes.T @ (weight[:, None] * slopes) + np.eye(len(vector)) * (
                0.0225 / trust**2
            )
            pull = slopes.T @ (weight * error) + (vector - self.start) * (0.0225 / trust**2)
            for _ in range(6):
                candidate = vector - np.linalg.solve(
                    normal + damping * np.diag(np.diag(normal)), pull
                )
                tried = self.errors(candidate, rows)
                if (found := cost(tried, candidate)) < best:
                    vector, error, done, best, damping = (
                        candidate,
                        tried,
                        best - found,
                        found,
                        damping / 3,
                    )
                    break
                damping *= 3
            else:
                break
            if done < 1e-4:
                break
        return vector


def report(title: str, errors: list[float]) -> str:
    sizes = sorted(abs(exp(error) - 1) for error in errors)
    tenth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    bias = exp(statistics.median(errors)) - 1
    return f"{title:22} {len(sizes):4} rows  median {statistics.median(sizes):6.1%}  p90 {tenth:6.1%}  bias {bias:+6.1%}"


def order(found: list[Any]) -> str:
    """Pairs of one model on as many of the same devices: how often the faster is predicted to be, and what the best guess loses."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for (source, _, work, kind, _, rate), error in found:
        same = (
            source,
            kind,
            work.format,
            work.layers,
            work.width,
            work.vocabulary,
            work.length,
            work.world,
        )
        groups[same].append((rate, rate * exp(error)))
    pairs = [
        (a, b)
        for group in groups.values()
        for a, b in combinations(group, 2)
        if abs(a[0] / b[0] - 1) > 0.05
    ]
    if not pairs:
        return "no two runs of one model on as many devices differ by over 5 %"
    right = sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs)
    several = [group for group in groups.values() if len(group) > 1]
    lost = [1 - max(group, key=lambda pair: pair[1])[0] / max(group)[0] for group in several]
    return f"order right in {right / len(pairs):.1%} of {len(pairs)} pairs; regret {statistics.mean(lost):.1%} over {len(lost)} groups"


UNSEEN = (
    "unseen",
    "unseen_second",
    "unseen_third",
    "unseen_own",
)  # no constant was fitted to these
FOUR = 0.8  # of five


def distances(row: Any, step: speed.StepTime) -> list[float]:
    """What a range grows with: 1, an engine like ours, Blackwell, and the parts of a step that models of few tokens, long sequences and pipelines have."""
    work, kind = row[2], row[3]
    small = step.update + step.launches + step.other
    parts = (small / step.total, step.attention / step.total, step.idle / step.total)
    return [1.0, 0.0 if work.tuned else 1.0, float(kind == "blackwell"), *parts]


def grown(features: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Fits the spread to the errors by least squares without negative slopes, and scales it to cover FOUR of them (split conformal, arXiv:2107.07511)."""
    kept, root = list(range(features.shape[1])), np.sqrt(weights)
    usual = np.minimum(errors, 0.6)
    while True:
        slopes = np.linalg.lstsq(features[:, kept] * root[:, None], usual * root, rcond=None)[0]
        if (slopes >= 0).all():
            break
        kept = [place for place, slope in zip(kept, slopes, strict=True) if slope > 0]
    found = np.zeros(features.shape[1])
    found[kept] = slopes
    scores = errors / np.maximum(features @ found, 0.02)
    ranked = np.argsort(scores)
    share = np.cumsum(weights[ranked]) / weights.sum()
    return found * scores[ranked[np.searchsorted(share, FOUR)]]


def ranges(found: list[Any], model: Model) -> None:
    """Prints the coverage of ranges that were fitted without the source that they are judged on."""
    constants, efficiency = model.unpack(model.given)
    features = np.array(
        [
            distances(row, speed.step_of(row[2], tune(row[4], row[3], efficiency), constants))
            for row, _ in found
        ]
    )
    errors = np.array([abs(error) for _, error in found])
    sources = np.array([row[0] for row, _ in found])
    counts = {source: (sources == source).sum() for source in sources}
    weights = np.array([float(counts[source]) ** -0.5 for source in sources])
    for title, columns in (
        ("one range for all", [0]),
        ("by distance", list(range(features.shape[1]))),
    ):
        covered, spreads = np.zeros(len(errors)), np.zeros(len(errors))
        for source in counts:
            out = sources == source
            slopes = grown(features[~out][:, columns], errors[~out], weights[~out])
            spreads[out] = features[out][:, columns] @ slopes
            covered[out] = errors[out] <= spreads[out]
        each = statistics.mean(covered[sources == source].mean() for source in counts)
        own = features[:, 1] > 0
        half = spreads > np.median(spreads)
        print(
            f"{title:18} covers {covered.mean():.1%} of {len(errors)} rows, {each:.1%} of a source on average, "
            f"{covered[own].mean():.1%} without Megatron's; wider half {covered[half].mean():.1%}, narrower "
            f"{covered[~half].mean():.1%}; spread {np.quantile(spreads, 0.1):.3f} to {np.quantile(spreads, 0.9):.3f}"
        )
    print("fitted to all:", grown(features, errors, weights).round(3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--quick", action="store_true", help="fit on all, judge on the same")
    parser.add_argument("--ranges", action="store_true")
    parser.add_argument("--worst", type=int, default=0)
    told = parser.parse_args()
    rows = usable([json.loads(line) for line in (told.rows or ROWS).read_text().splitlines()])
    model, found = Model(), []
    sources = sorted({row[0] for row in rows})
    if told.rows or told.quick:
        vector = model.given if told.rows else model.fit(rows)
        found = list(zip(rows, model.errors(vector, rows), strict=True))
    else:
        for source in sources:
            vector = model.fit([row for row in rows if row[0] != source])
            left = [row for row in rows if row[0] == source]
            found += list(zip(left, model.errors(vector, left), strict=True))
    if told.ranges:
        lines = [
            line
            for name in UNSEEN
            for line in (ROWS.parent / f"{name}.jsonl").read_text().splitlines()
        ]
        unseen = usable([json.loads(line) for line in lines])
        ranges(found + list(zip(unseen, model.errors(model.given, unseen), strict=True)), model)
    for source in sources:
        print(report(source, [error for row, error in found if row[0] == source]))
    print(report("all", [error for _, error in found]))
    print(order(found))
    for row, error in sorted(found, key=lambda pair: -abs(pair[1]))[: told.worst]:
        constants, efficiency = model.unpack(vector)
        step = speed.step_of(row[2], tune(row[4], row[3], efficiency), constants)
        parts = " ".join(
            f"{f.name}={getattr(step, f.name) / step.total:.0%}"
            for f in fields(step)
            if getattr(step, f.name) > 0.02 * step.total
        )
        print(f"  {exp(error) - 1:+.0%} {row[1]} {row[5]:,.0f}/s: {parts}")
    if told.rows:
        return
    vector = vector if told.quick else model.fit(rows)
    constants, efficiency = model.unpack(vector)
    print(
        "\n".join(
            f"{name} = {getattr(constants, name):.4g}  (began {getattr(Constants(), name):.4g})"
            for name in FREE
        )
    )
    print({kind: round(value, 3) for kind, value in efficiency.items()})


if __name__ == "__main__":
    main()
