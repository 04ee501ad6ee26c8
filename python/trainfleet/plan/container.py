"""Runs a node's part in an image on a host with Docker: the command at the end of its script. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..hardware.node_types import device_of

# The devices that are there at start are given over, as their number follows from the instance type; so is the node's own
# disk where the dataset is copied to it (runs.COPY); files belong to who trains.
RUN = (
    'for device in /dev/neuron[0-9]* /dev/infiniband; do [ -e "$device" ] && set -- "--device=$device" "$@"; done; '
    '[ -z "${TRAINFLEET_COPY:-}" ] || set -- "--volume=$TRAINFLEET_COPY:$TRAINFLEET_COPY" "$@"; '
    'exec docker run --user "$(id -u):$(id -g)" --volume "$HOME/.trainfleet:$HOME/.trainfleet" "$@"'
)


def container_words(image: str, folder: str, stack: str, names: Iterable[str], words: Sequence[str]) -> list[str]:
    """The command that runs `python -m words` in an image: in `folder`, where it sees what the host sees, and nothing else of it.

    `names`: the variables that it gets, whose values stand in no word. The network, shared memory and locked memory are the
    host's, as EFA and NCCL need them. What the container is asked by a signal, Docker passes on.
    """
    own = [
        "--rm",
        "--network=host",
        "--ipc=host",
        "--ulimit=memlock=-1",
        "--ulimit=nofile=65536",
        "--env=HOME=/tmp",
        "--env=USER=trainer",
    ]
    gpus = ["--gpus=all"] if device_of(stack) == "cuda" else []
    passed = [f"--env={name}" for name in sorted(set(names))]
    return ["sh", "-c", RUN, "docker", *own, *gpus, f"--volume={folder}:{folder}", f"--workdir={folder}", *passed, image, *words]
