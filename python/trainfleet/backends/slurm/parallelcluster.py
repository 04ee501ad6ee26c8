"""AWS ParallelCluster machines: runs pcluster to create, update and delete the cluster.

The file system is kept when the cluster is deleted, because it contains data. `make clean PURGE=1`
deletes it too. All resources are found by tag, so no local state is needed.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cloud import checks, plan_text
from ...cloud.calls import Calls, Json, passing
from ...cloud.cloudformation import CONFIG
from ...cloud.discovery import known, public_key
from ...cloud.inventory import Sweep, costing, surely
from ...cloud.prices import in_region
from ...cloud.resource_types import tags_of
from ...cloud.scheduler_template import NETWORK
from ...cloud.template_inputs import Inputs, cluster_name, own_tags, pairs
from ...config import Config
from ...config.tables import read_table
from ...plan.job import Artifact
from ...storage import s3
from ...trust.errors import BackendError
from ..aws_managed import priced
from ..base import Changes, Machines, Prospect
from ..ec2_machines import Stacked, policies, prove_gone, say, told_of
from . import cluster_file, cluster_parts

EVERY = 15.0  # CloudFormation polling interval in seconds
PATIENCE = 3600.0  # timeout in seconds for CloudFormation
TIMEOUT = 300.0  # timeout in seconds per pcluster command, including validation
UNCHANGED = "No changes found"
INSTALL = (
    "run pipx install aws-parallelcluster; it also needs Node.js "
    "(docs.aws.amazon.com/parallelcluster/latest/ug/install-v3.html)"
)
KINDS: dict[str, str] = read_table(Path(__file__).with_name("cluster_kinds.yaml"))


@dataclass(frozen=True)
class ClusterState:
    """State of a cluster, from describe-cluster.

    `why` is the failure reason, `maker` is the config that created the cluster, and `stack` is the
    ARN of its stack. `address` and `instance` identify the head node, if it exists.
    """

    status: str
    address: str = ""
    why: str = ""
    instance: str = ""
    maker: str = ""
    stack: str = ""

    @property
    def passes(self) -> bool:
        return self.status.endswith("_IN_PROGRESS")

    @property
    def is_ready(self) -> bool:
        return self.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE")


class Cluster(Machines):
    """Machines (base.py) that ParallelCluster creates."""

    made = True

    def __init__(self, config: Config, enter: Callable[[], int] = lambda: 0) -> None:
        """`enter` sets up the nodes' shared folder once the cluster is ready."""
        self.config, self.name, self.enter = config, cluster_name(config), enter
        self.region = config.fleet.aws.region or ""
        self.system = config.fleet.slurm.parallelcluster.os
        self.calls = Calls(self.region)

    def changes(self) -> Changes:
        """Returns the network request, the cluster file, the node script and an IAM policy for the
        caller.

        Returns () if everything is up to date.
        """
        state = self.look() if is_there() else None  # planning does not require pcluster
        return self._all(state, self._cluster(state) if is_there() else self._wanted(None))

    def _all(self, state: ClusterState | None, cluster: Changes) -> Changes:
        found = (
            *cluster_parts.network_changes(self.config, state.maker if state else ""),
            *cluster,
        )
        return (*found, *policies(self.config, self._asked[0])) if found else ()

    @functools.cached_property
    def _asked(self) -> tuple[Inputs, str]:
        return known(self.config, self.calls, NETWORK)

    def _wanted(self, state: ClusterState | None) -> Changes:
        maker = state.maker if state else ""
        placed = cluster_parts.with_network(self.config, maker)
        stack = state.stack if state else ""
        left = cluster_parts.left_behind(placed, self.calls, maker, stack)
        return cluster_file.artifacts(cluster_parts.with_file_system(placed, left), maker)

    def _cluster(self, state: ClusterState | None) -> Changes:
        """Returns the cluster file and the node script, or () if the cluster is up to date."""
        wanted = self._wanted(state)
        if state is None or not state.is_ready:
            return wanted
        said = self._pcluster(
            "update-cluster", *self._file(wanted), "--dryrun", "true", may_fail=True
        )
        return () if UNCHANGED in json.dumps(said) else wanted

    def prospect(self, hours: float | None, speed: float | None) -> Prospect:
        """Returns the cluster's cost, obstacles in the account, and the changes.

        If pcluster can't report the changes, returns all of the cluster's files.
        """
        prices = in_region(self.config)
        try:
            changes = self.changes()
        except BackendError:
            changes = self._all(None, self._wanted(None))
        told = priced(
            cluster_file.costs(self.config, prices), self.config.fleet.nodes, prices, hours
        )
        return Prospect(
            ("", *told, "", *plan_text.account(self.config, self.calls, *self._asked)), changes
        )

    def apply(self) -> int:
        """Creates or updates the cluster and waits until it is ready. Raises a BackendError
        explaining the first failure.
        """
        state = self.look()
        if state and state.passes:
            print(f"{self.name} is already in progress: {state.status}")
        else:
            key = public_key(self.config) if state is None else ""
            if state is None:
                checks.require(self.config, self.calls, self._asked[0])
            if cluster_parts.network_changes(self.config, state.maker if state else ""):
                Stacked(cluster_parts.network_stack(self.config)).make()
            if key:
                self._provide_key(key)
            placed = cluster_parts.with_network(self.config)
            if state is None and (row := cluster_parts.left_behind(placed, self.calls)):
                for line in cluster_parts.describe_file_system(placed, self.calls, row):
                    say(line)
                cluster_parts.open_to_network(self.calls, row)
            self._begin(state, self._cluster(state))
        made = self._follow()
        address = made.address or "without a public address"
        print(
            f"{self.name}: {made.status}, head node {address}; its nodes start when a job needs "
            "them"
        )
        print("next: make train")
        return self.enter()

    def _begin(self, state: ClusterState | None, wanted: Sequence[Artifact]) -> None:
        if not wanted:
            print(f"{self.name} already matches {cluster_file.FILE}")
            return
        for artifact in wanted:
            if artifact.name == cluster_file.SCRIPT:
                s3.write(
                    cluster_file.script_address(self.config, artifact.text), artifact.text.encode()
                )
        said = self._pcluster(
            "update-cluster" if state else "create-cluster",
            *self._file(wanted),
            *([] if state else ["--rollback-on-failure", "false"]),
        )
        for warning in said.get("validationMessages") or ():
            print(f"{warning.get('level', '').lower()}: {warning.get('message', '')}")
        print(
            f"{self.name} is being {'updated' if state else 'created'}; this takes about ten "
            "minutes"
        )

    def _provide_key(self, key: str) -> None:
        """Imports the public key as the cluster's key pair, unless the key pair exists."""
        tags = [{"ResourceType": "key-pair", "Tags": pairs(own_tags(self.config.fleet_name))}]
        with passing("InvalidKeyPair.Duplicate"):
            self.calls(
                "ec2",
                "ImportKeyPair",
                KeyName=cluster_file.key_of(self.config),
                PublicKeyMaterial=key.encode(),
                TagSpecifications=tags,
            )

    def _file(self, wanted: Sequence[Artifact]) -> list[str]:
        folder = Path(tempfile.mkdtemp(prefix="trainfleet-cluster-"))
        file = folder / cluster_file.FILE
        file.write_text(
            next(artifact.text for artifact in wanted if artifact.name == cluster_file.FILE),
            encoding="utf-8",
        )
        return ["--cluster-name", self.name, "--cluster-configuration", str(file)]

    def _follow(self, gone: bool = False) -> ClusterState:
        """Prints the cluster's events until it is stable, and returns its state."""
        shown, deadline = set[str](), time.monotonic() + PATIENCE
        while True:
            state = self.look()
            self._show_events(shown)
            if state is None or not state.passes:
                break
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{self.name} is still in progress: {state.status}",
                    where=self.region,
                    next="run the command again",
                )
            time.sleep(EVERY)
        if state is None and gone:
            return ClusterState("DELETE_COMPLETE")
        if state is None or not state.is_ready:
            raise self._failed(state)
        return state

    def _show_events(self, shown: set[str]) -> None:
        for event in self._events():
            if str(event.get("eventId")) in shown:
                continue
            shown.add(str(event.get("eventId")))
            if line := in_words(event):
                print(f"  {line}")

    def _events(self) -> list[Json]:
        """Returns the cluster's CloudFormation events, oldest first."""
        said = self._pcluster(
            "get-cluster-stack-events", "--cluster-name", self.name, may_fail=True
        )
        return list(reversed(said.get("events") or ()))

    def _failed(self, state: ClusterState | None) -> BackendError:
        failed = [event for event in self._events() if "FAILED" in str(event.get("resourceStatus"))]
        first: Json = next(
            (
                event
                for event in failed
                if "cancelled" not in str(event.get("resourceStatusReason")).lower()
            ),
            {},
        )
        why = in_words(first) or (state.why if state else "") or "pcluster gives no reason"
        status = state.status if state else "it no longer exists"
        return BackendError(
            f"could not create the cluster {self.name}: {status}",
            where=self.region,
            why=why,
            next=f"run pcluster get-cluster-log-events --cluster-name {self.name}; then make clean "
            "and make setup",
        )

    def look(self) -> ClusterState | None:
        """Returns the cluster's state, or None if the cluster does not exist."""
        said = self._pcluster("describe-cluster", "--cluster-name", self.name, may_fail=True)
        if "clusterStatus" not in said:
            if "does not exist" in str(said.get("message")):
                return None
            why, then = str(said.get("message"))[:300], "aws sts get-caller-identity"
            raise BackendError(
                "pcluster can't describe the cluster", where=self.name, why=why, next=then
            )
        head, reasons = said.get("headNode") or {}, said.get("failures") or [{}]
        address = str(head.get("publicIpAddress") or head.get("privateIpAddress") or "")
        maker = tags_of(said.get("tags")).get(CONFIG, "")
        why = str(reasons[0].get("failureReason") or "")
        return ClusterState(
            str(said["clusterStatus"]),
            address,
            why,
            str(head.get("instanceId") or ""),
            maker,
            str(said.get("cloudformationStackArn") or ""),
        )

    def head(self) -> str:
        """Returns the head node's address, or its instance ID if only Session Manager has access.

        Returns "" if the cluster does not exist or pcluster is not installed.

        Raises:
            BackendError: the cluster is not ready.
        """
        state = self.look() if is_there() else None
        if state is None:
            return ""
        if state.passes:
            raise BackendError(
                f"the cluster {self.name} is not ready: {state.status}",
                where=self.region,
                next="run make setup to wait for it",
            )
        if not state.is_ready or not state.address:
            raise BackendError(
                f"the cluster {self.name} can't be used: {state.status}",
                where=self.region,
                why=state.why,
                next="run make clean, then make setup",
            )
        return state.instance if self.config.fleet.aws.ssm_only else state.address

    def left(self) -> list[str]:
        """Returns a line for the cluster, and one with the cost of each resource that has this
        config's tag.
        """
        state = self.look()
        if state and state.maker not in ("", self.config.fleet_name):
            state = None
        own = [f"cluster {self.name}: {state.status}"] if state else []
        return own + [one.line() for one in surely(self.calls, self.config.fleet_name)]

    def costing(self) -> list[str]:
        return costing(surely(self.calls, self.config.fleet_name))

    @told_of("some resources still exist", "run make clean again")
    def remove(self, purge: bool) -> None:
        """Deletes the cluster, and verifies that only resources with data remain.

        With `purge`, none may remain.

        Raises:
            BackendError: other resources remain. The message includes their cost.
        """
        own = cluster_parts.network_stack(self.config)
        try:
            self._delete()
        except BackendError:
            # stop paying for instances even if pcluster fails
            Sweep(self.calls, own.stack, say).end_instances()
            raise
        stay = own.remove(purge, say)
        prove_gone(
            surely(self.calls, self.config.fleet_name),
            stay,
            self.config.fleet_name,
            self.calls,
            own.troubles,
        )

    def _delete(self) -> None:
        """Deletes the cluster and waits for the deletion. Does nothing if another config created
        it.
        """
        state = self.look()
        if state and state.maker not in ("", self.config.fleet_name):
            say(
                f"the cluster {self.name} is kept, because the config {state.maker} created it; "
                "run make clean with that config to remove it"
            )
        elif state:
            if state.status != "DELETE_IN_PROGRESS":
                self._pcluster("delete-cluster", "--cluster-name", self.name)
            self._follow(gone=True)
            say(f"the cluster {self.name} is deleted")

    def _pcluster(self, verb: str, *words: str, may_fail: bool = False) -> Json:
        """Runs pcluster and returns its response, which is JSON even if the command fails.

        Raises:
            BackendError: pcluster is missing, or the command failed. The message contains all
                validation errors.
        """
        if not is_there():
            why = "fleet.slurm.create needs the AWS ParallelCluster CLI"
            raise BackendError("pcluster is not in this machine's PATH", why=why, next=INSTALL)
        command = ["pcluster", verb, *words, "--region", self.region]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            what, why = f"pcluster {verb} does not respond", f"no answer in {TIMEOUT:.0f} s"
            raise BackendError(what, why=why, next="run the command again") from error
        said = (
            _parsed(done.stdout)
            or _parsed(done.stderr)
            or {"message": (done.stderr or done.stdout).strip()}
        )
        if done.returncode and not may_fail:
            errors = [
                entry.get("message", "")
                for entry in said.get("configurationValidationErrors") or ()
                if entry.get("level") == "ERROR"
            ]
            why = "; ".join(errors) or str(said.get("message"))
            raise BackendError(
                f"pcluster {verb} failed",
                where=self.name,
                why=why[:2000],
                next="run make plan OUT=folder to see cluster.yaml",
            )
        return said


def is_there() -> bool:
    """Returns whether pcluster is installed on this machine."""
    return shutil.which("pcluster") is not None


def _parsed(text: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def in_words(event: Json) -> str:
    """Formats a CloudFormation event as one line, or returns "" if it doesn't concern users."""
    status, kind = str(event.get("resourceStatus", "")), str(event.get("resourceType", ""))
    what = KINDS.get(kind)
    if not status or (what is None and "FAILED" not in status):
        return ""
    verb, _, phase = status.partition("_")
    done = {"CREATE": "created", "UPDATE": "updated", "DELETE": "deleted"}.get(verb, verb.lower())
    how = {
        "IN_PROGRESS": f"is being {done}",
        "COMPLETE": f"is {done}",
        "FAILED": f"could not be {done}",
    }.get(phase, status)
    why = str(event.get("resourceStatusReason") or "") if "FAILED" in status else ""
    name = f" ({event.get('logicalResourceId')})" if what is None or "FAILED" in status else ""
    return f"{what or kind}{name} {how}{f': {why}' if why else ''}"
