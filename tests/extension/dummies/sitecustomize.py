"""For every Python that has this folder in its path: there is one more of each thing, each a row in its one place."""

from dataclasses import replace
from pathlib import Path

from trainfleet.config.families import FAMILIES, PRESETS, Preset
from trainfleet.config.optimizers import OPTIMIZERS, Optimizer
from trainfleet.data.format_table import FORMATS, Format
from trainfleet.hardware import node_types
from trainfleet.health.faults import FAULTS, Fault
from trainfleet.watch import causes
from trainfleet.watch.causes import CAUSES, Cause

node_types.INSTANCE_TYPES["x9.48xlarge"] = replace(
    node_types.INSTANCE_TYPES["p5.48xlarge"],
    name="x9.48xlarge",
    usd_per_hour=77.0,
    sagemaker_usd_per_hour=99.0,
)
OPTIMIZERS["lion"] = Optimizer("lion", "dummy_parts:lion", moments=5, others=5)
FAMILIES["giraffe"] = replace(FAMILIES["llama"], name="giraffe", module="dummy_parts:Giraffe")
PRESETS["calf"] = Preset(
    "giraffe", 2, 32, heads=2, kv_heads=1, intermediate_size=64, max_position_embeddings=64
)
FORMATS["rot13"] = Format("rot13", (".rot",), "dummy_reader:read_rot13")
CAUSES["moths"] = Cause("moths", "moths have been here", "make camphor")
causes.FOLDERS.append(Path(__file__).parent)


def _release(trainer: object) -> None:
    raise RuntimeError("moths have eaten the wires")


FAULTS["moths-released"] = Fault(
    "moths-released", "moths are released on rank 1", ("moths",), 1, play=_release
)
