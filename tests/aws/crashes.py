"""Every request of a verb as the moment at which its process dies, and what `make clean` makes of it from another folder."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from trainfleet import cli
from trainfleet.backends import backend_of, ec2
from trainfleet.backends.run_storage import BucketPlace
from trainfleet.cloud import cloudformation, inventory
from trainfleet.cloud.template_inputs import own_tags
from trainfleet.hosts import host_setup
from trainfleet.hosts.host_results import Host, HostFailure
from trainfleet.hosts.transport import Transport
from trainfleet.launch import run_location
from trainfleet.storage import s3

from .account import Account, Killed, Thing
from .metal import CONSOLE
from .world import aws, said, strangers

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1qkUmTbFzOXSxV7b9fXkD6wzhTnnZlZ0Yb0a3m0000"
Prepare = Callable[[Account], None]


class World:
    """An account with others' things in it. `config`: what is typed there, else world.said with `changes`; `told` and `before`: what
    the last verb said, and how many requests there were before it."""

    def __init__(
        self,
        prepare: Prepare = lambda account: None,
        config: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.account, self.told, self.before = Account(), "", 0
        self.config = dict(config or said(**changes))
        strangers(self.account)
        images = {
            "sha256:1": {"cloudy.cpu-1", "another.cpu-1"},
            "sha256:2": {"cloudy.cpu-2"},
            "sha256:3": {"another.cpu-3"},
        }
        self.account.add(
            "repository",
            "trainfleet",
            {"imageTagMutability": "IMMUTABLE"},
            own_tags("cloudy"),
            images=images,
        )
        runs = {
            "some/runs/theirs/results.json": 300,
            "some/runs/theirs/checkpoints/step-00000004/committed.json": 9,
        }
        self.account.add("bucket", "runs-of-another", {}, {"team": "theirs"}, objects=runs)
        prepare(self.account)
        self.theirs = {id: _state(thing) for id, thing in self.account.things.items()}
        self.account.on_launch = lambda instance: instance.more.update(
            console=CONSOLE.format(key=KEY)
        )

    def type(self, verb: str, *words: str) -> tuple[int | None, str]:
        """The exit code of a verb, typed in a new folder that has nothing but the config, and all that it said.

        None where its process died. Hosts are not set up and not reached, as there are none behind the account's instances.
        """
        heard, before = io.StringIO(), Path.cwd()
        self.before = len(self.account.calls)
        with tempfile.TemporaryDirectory() as folder, aws(self.account) as patch:
            paces = (
                (cloudformation, "POLL", 60.0),
                (inventory, "PAUSE", 60.0),
                (inventory, "AGAIN", 5.0),
                (run_location, "PATIENCE", 0.0),
            )
            for module, name, value in paces:
                patch.setattr(module, name, value)  # fewer looks: each is a case of the matrix
            patch.setattr(host_setup, "main", lambda config, **_: 0)
            patch.setattr(
                ec2, "_at_rest", lambda head: (Host(head._cloud().nodes()[-1].id, ""), None)
            )
            patch.setattr(ec2, "_sealed", lambda *_: contextlib.nullcontext())
            patch.setattr(s3, "list_objects", lambda address: [])  # objects are tests/distributed's
            patch.setattr(BucketPlace, "ask_to_stop", lambda place: None)
            patch.setattr(
                Transport, "ask", lambda *_, **__: HostFailure("down", "nothing answers", "")
            )
            backend_of.cache_clear()
            os.chdir(folder)
            Path("config.yaml").write_text(yaml.safe_dump(self.config))
            try:
                with (
                    contextlib.redirect_stdout(heard),
                    contextlib.redirect_stderr(heard),
                    mock.patch("sys.stdin", io.StringIO()),
                ):
                    return cli.main([verb, *words]), heard.getvalue()
            except Killed:
                return None, heard.getvalue()
            finally:
                self.told = heard.getvalue()
                os.chdir(before)
                self.account.dies = None

    @property
    def ours(self) -> dict[str, str]:
        """What there is but for others' things, whether it has our tags or not."""
        return {
            thing.id: thing.kind for thing in self.account.living() if thing.id not in self.theirs
        }

    @property
    def held(self) -> set[str]:
        """The tags by which our config holds images."""
        images = self.account.things["trainfleet"].more["images"]
        return {tag for tags in images.values() for tag in tags if tag.startswith("cloudy.")}

    @property
    def untouched(self) -> bool:
        """Whether others' machines, runs and images are as they were."""
        things = self.account.things
        return all(id in things and _state(things[id]) == was for id, was in self.theirs.items())


def _state(thing: Thing) -> object:
    """All of a thing that its owner would miss: also what is in a bucket, and the images that others hold in a repository."""
    images = {
        digest: {tag for tag in tags if not tag.startswith("cloudy.")}
        for digest, tags in thing.more.get("images", {}).items()
    }
    theirs = {digest: tags for digest, tags in images.items() if tags}
    return copy.deepcopy(
        (thing.state, thing.tags, thing.properties, thing.more.get("objects"), theirs)
    )


def data(account: Account) -> None:
    """Something is written to the file system, and to the bucket."""
    for thing in account.things.values():
        if thing.made_by and thing.kind == "file-system":
            thing.more["written"] = 1e9
        if thing.made_by and thing.kind == "bucket":
            thing.more["objects"] = {"data/0": 10}


def deaths(verb: str, *words: str, after: tuple[str, ...] = (), prepare: Prepare = lambda account: None, holds_data: bool = False,
           step: int = 1, killer: type[BaseException] = Killed, config: Mapping[str, Any] | None = None,
           work: Prepare = lambda account: None) -> Iterator[tuple[str, World]]:  # fmt: skip
    """A world for each request at which the verb dies, before AWS has heard it and after AWS has done it; what came `after` first.

    `work`: what is done in the account between.
    """
    ready = World(prepare, config)
    for earlier in after:
        code, told = ready.type(earlier)
        assert code == 0, told
    work(ready.account)
    if holds_data:
        data(ready.account)
    ready.account.rest()  # nothing is under way, so that it can be copied
    whole, first = copy.deepcopy(ready), len(ready.account.calls)
    whole.type(verb, *words)
    for number in range(first, len(whole.account.calls), step):
        for moment in ("before", "after"):
            world = copy.deepcopy(ready)
            world.account.dies, world.account.killer = (number, moment), killer
            code, told = world.type(verb, *words)
            assert code == (None if killer is Killed else 130), f"{number} {moment}: {told}"
            service, operation, _ = world.account.calls[number]
            yield f"{verb} died {moment} {service} {operation}, its request {number - first}", world
