"""What each recipe's plan predicts beside what has been published of its model on its devices.

    PYTHONPATH=python python tests/bench/bench_recipes.py

A row a recipe: tokens/s of a device as planned, the published run of the same shape and length, of its degrees and compiled or not as it is first, that has the nearest number of devices,
and the planned over that. Layouts, batches and links differ, so this is a check of scale. What Neuron published of whole nodes
(report/proposal.py) comes first; other rows are those of published.jsonl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import fit_planner

from trainfleet.config import Config, Settings, load
from trainfleet.config.speed_inputs import predict, work_of
from trainfleet.hardware import accelerators, node_types
from trainfleet.recipes import FOLDER
from trainfleet.report.proposal import ROWS

KINDS = {
    "A100": "ampere",
    "H100": "hopper",
    "H200": "hopper",
    "B200": "blackwell",
    "NeuronCore-v2": "neuron",
}


def published(
    config: Config, device: node_types.Accelerator
) -> Iterator[tuple[bool, int, float, str]]:
    """Whether its layout is another, devices, tokens/s of one, and the source: of runs of this model, length and kind of device."""
    for row in ROWS if device is accelerators.BY_NAME["NeuronCore-v2"] else ():
        if (row.preset, row.length) == (config.model.preset, config.train.sequence_length):
            yield (
                False,
                32 * row.nodes,
                row.sequences * row.length / 32 / row.nodes,
                f"Neuron {row.sdk}, {row.layout}",
            )
    kind, shape = KINDS.get(device.name.rpartition("-")[0] or device.name, ""), work_of(config)
    for source, name, work, family, _, rate in fit_planner.usable(
        [json.loads(line) for line in fit_planner.ROWS.open()]
    ):
        same = (work.layers, work.width, work.length, work.gated) == (
            shape.layers,
            shape.width,
            shape.length,
            shape.gated,
        )
        if (
            same
            and family.startswith(kind or KINDS.get(device.name, "none"))
            and work.format == shape.format
        ):
            other = [work.tensor, work.pipeline, work.context, work.fused] != [
                shape.tensor,
                shape.pipeline,
                shape.context,
                shape.fused,
            ]
            yield other, work.world, rate, f"{source}: {name}"


def main() -> None:
    print(
        f"{'recipe':38} {'devices':>8} {'planned':>8} {'published':>10} {'of':>6} {'ratio':>6}  source"
    )
    for path in sorted(FOLDER.glob("*.yaml")):
        config = load(Settings(path))[0]
        device, step = config.fleet.rank_device, predict(config)
        if step is None or device is None:
            print(f"{path.stem:38} {config.world_size:8,}  this machine, or no figures")
            continue
        planned = (
            config.train.global_batch_size
            * config.train.sequence_length
            / step.total
            / config.world_size
        )
        known = min(
            published(config, device),
            key=lambda row: (row[0], abs(row[1] - config.world_size)),
            default=None,
        )
        if known is None:
            print(
                f"{path.stem:38} {config.world_size:8,} {planned:8,.0f}  none published of this model and length on {device.name}"
            )
            continue
        _, ranks, rate, source = known
        print(
            f"{path.stem:38} {config.world_size:8,} {planned:8,.0f} {rate:10,.0f} {ranks:6,} {planned / rate:6.2f}  {source}"
        )


if __name__ == "__main__":
    main()
