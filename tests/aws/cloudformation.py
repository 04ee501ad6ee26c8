"""The pretended account's CloudFormation: resources in the order of their dependencies, rollback, updates, and deletions that fail."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import identity, resources
from .account import Account, Refused, answers, moment_of, tag_list, tags_of
from .resolving import Resolver, needs

LONGEST = 51_200  # bytes of a template in a request
TRIES = 3  # deletions of one resource until CloudFormation gives up
TRY_AGAIN = 15.0


@dataclass
class Resource:
    type: str
    physical: str = ""
    status: str = ""
    reason: str = ""
    properties: dict[str, Any] = field(default_factory=dict)
    policy: str = "Delete"


@dataclass
class Stack:
    """One stack, and what it is at. `doing`: the resources whose creation has begun and not ended."""

    account: Account
    name: str
    arn: str
    template: dict[str, Any]
    parameters: dict[str, str]
    tags: dict[str, str]
    since: float
    on_failure: str = "ROLLBACK"
    token: str = ""
    status: str = ""
    reason: str = ""
    resources: dict[str, Resource] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    doing: set[str] = field(default_factory=set)
    failed: bool = False
    made: list[str] = field(default_factory=list)  # what the update under way has made
    old: dict[str, Resource] = field(
        default_factory=dict
    )  # what it replaces and removes, once it is done
    before: tuple[dict[str, Any], dict[str, str]] | None = None
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    # What it says

    def say(self, logical: str, physical: str, type_: str, status: str, reason: str = "") -> None:
        event = {"StackId": self.arn, "StackName": self.name, "EventId": f"{logical}-{next(self.numbers):06d}", "LogicalResourceId": logical,
                 "PhysicalResourceId": physical, "ResourceType": type_, "Timestamp": moment_of(self.account.moment), "ResourceStatus": status}  # fmt: skip
        self.events.append(event | ({"ResourceStatusReason": reason} if reason else {}))

    def becomes(self, status: str, reason: str = "") -> None:
        self.status, self.reason = status, reason
        self.say(self.name, self.arn, "AWS::CloudFormation::Stack", status, reason)

    def marks(self, logical: str, status: str, reason: str = "") -> None:
        resource = self.resources.get(logical) or self.old[logical]
        resource.status, resource.reason = status, reason
        self.say(logical, resource.physical, resource.type, status, reason)

    # What it makes

    @property
    def wanted(self) -> dict[str, Any]:
        resolver = self.resolver()
        return {
            name: row
            for name, row in self.template["Resources"].items()
            if "Condition" not in row or resolver.holds(row["Condition"])
        }

    def resolver(self) -> Resolver:
        pseudo = {"AWS::Region": self.account.region, "AWS::AccountId": self.account.number, "AWS::StackName": self.name,
                  "AWS::StackId": self.arn, "AWS::Partition": "aws", "AWS::URLSuffix": "amazonaws.com"}  # fmt: skip
        return Resolver(
            self.template, self.parameters, pseudo, self.account.zones, self._ref, self._attribute
        )

    def _ref(self, name: str) -> str:
        if name not in self.resources:
            raise Refused(
                "ValidationError",
                f"Template format error: Unresolved resource dependencies [{name}] in the Resources block of the template",
            )
        return resources.reference(
            self.account, self.resources[name].type, self.resources[name].physical
        )

    def _attribute(self, name: str, attribute: str) -> Any:
        return resources.attribute(
            self.account, self.resources[name].type, self.resources[name].physical, attribute
        )

    def advance(self) -> None:
        """Begins what has all that it needs; when nothing is left, the stack is complete."""
        wanted = self.wanted
        for name, row in wanted.items():
            if self.failed or (name in self.resources and self.resources[name].status != "WAITING"):
                continue
            if all(
                self.resources.get(other)
                and self.resources[other].status in ("CREATE_COMPLETE", "UPDATE_COMPLETE")
                for other in needs(row, set(wanted))
            ):
                self._begin(name, row)
        if (
            not self.failed
            and all(
                self.resources[name].status in ("CREATE_COMPLETE", "UPDATE_COMPLETE")
                for name in wanted
                if name in self.resources
            )
            and set(wanted) <= set(self.resources)
        ):
            self._complete()

    def _begin(self, name: str, row: Mapping[str, Any]) -> None:
        before = self.resources.get(name)
        properties = self.resolver().value(row.get("Properties", {}))
        policy = row.get("DeletionPolicy", "Delete")
        if (
            before is not None
            and before.physical
            and not resources.is_replaced(before.type, before.properties, properties)
        ):
            changed, before.policy = properties != before.properties, policy
            try:
                if changed:
                    identity.handle(self.account, self.name, row["Type"], "update", properties)
            except Refused as refused:
                self.doing.add(name)
                return self._refuse(name, refused)
            resources.update(self.account, before.type, before.physical, properties, self.tags)
            before.properties, before.status = properties, "UPDATE_COMPLETE"
            if changed:
                self.marks(name, "UPDATE_COMPLETE")
            return self._later()
        if before is not None and before.physical:
            self.old[f"{name} "] = before  # removed once the update is done
        resource = self.resources[name] = Resource(row["Type"], "", "", "", properties, policy)
        self.made.append(name)
        self.say(name, "", row["Type"], "CREATE_IN_PROGRESS")
        resource.status = "CREATE_IN_PROGRESS"
        self.doing.add(name)
        try:
            identity.handle(self.account, self.name, row["Type"], "create", properties)
            resource.physical = resources.make(
                self.account, self.name, self.arn, name, row["Type"], properties, self.tags
            )
        except Refused as refused:
            return self._refuse(name, refused)
        self.account.later(resources.seconds(row["Type"]), lambda: self._ended(name, ""))

    def _refuse(self, name: str, refused: Refused) -> None:
        words = f'Resource handler returned message: "{refused.message} (Service: Ec2, Status Code: 400, Request ID: 0)" (RequestToken: 0, HandlerErrorCode: GeneralServiceException)'
        self.account.later(3.0, lambda: self._ended(name, words))

    def _later(self) -> None:
        self.account.later(0.0, self.advance)

    def _ended(self, name: str, trouble: str) -> None:
        if name not in self.doing:
            return
        self.doing.discard(name)
        trouble = (
            trouble
            or self.account.faults.get(self.resources[name].type, "")
            or self.account.faults.get(name, "")
        )
        if self.failed:
            return self.marks(name, "CREATE_FAILED", "Resource creation cancelled")
        if trouble:
            self.marks(name, "CREATE_FAILED", trouble)
            self.failed = True
            for other in sorted(self.doing):
                self.marks(other, "CREATE_FAILED", "Resource creation cancelled")
            self.doing.clear()
            return self._roll_back(f"The following resource(s) failed to create: [{name}]. ")
        self.marks(name, "CREATE_COMPLETE")
        self.advance()

    def _complete(self) -> None:
        if self.status == "CREATE_IN_PROGRESS":
            return self.becomes("CREATE_COMPLETE")
        if self.status == "UPDATE_IN_PROGRESS":
            self.becomes("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
            remove(self, dict(self.old), lambda failed: self._cleaned())

    def _cleaned(self) -> None:
        self.old.clear()
        self.before = None
        self.becomes("UPDATE_COMPLETE")

    def _roll_back(self, why: str) -> None:
        if self.status == "UPDATE_IN_PROGRESS":
            self.becomes("UPDATE_ROLLBACK_IN_PROGRESS", why)
            doomed = {
                name: self.resources.pop(name) for name in self.made if name in self.resources
            }
            for name, resource in list(self.old.items()):
                self.resources[name.strip()] = resource
            self.old.clear()
            assert self.before is not None
            self.template, self.parameters = self.before

            def back(failed: bool) -> None:
                self.becomes("UPDATE_ROLLBACK_COMPLETE_CLEANUP_IN_PROGRESS")
                self.becomes("UPDATE_ROLLBACK_COMPLETE")

            return remove(self, doomed, back, on_create=True)
        if self.on_failure == "DO_NOTHING":
            return self.becomes("CREATE_FAILED", why)
        deletes = self.on_failure == "DELETE"
        self.becomes(
            "DELETE_IN_PROGRESS" if deletes else "ROLLBACK_IN_PROGRESS",
            why + ("Delete requested by user." if deletes else "Rollback requested by user."),
        )

        def rolled(failed: bool) -> None:
            over = (
                ("DELETE_FAILED", "DELETE_COMPLETE")
                if deletes
                else ("ROLLBACK_FAILED", "ROLLBACK_COMPLETE")
            )
            self.becomes(over[0] if failed else over[1])

        remove(self, dict(self.resources), rolled, on_create=True)

    def delete(self, retained: Iterable[str]) -> None:
        self.failed = True
        self.becomes("DELETE_IN_PROGRESS", "User Initiated")
        for name in sorted(self.doing):
            self.marks(name, "CREATE_FAILED", "Resource creation cancelled")
        self.doing.clear()
        keep = set(retained)
        doomed = {
            name: row
            for name, row in self.resources.items()
            if row.status != "DELETE_COMPLETE" and row.physical and name not in keep
        }

        def over(failed: bool) -> None:
            names = ", ".join(
                sorted(
                    name for name, row in self.resources.items() if row.status == "DELETE_FAILED"
                )
            )
            self.becomes(
                "DELETE_FAILED", f"The following resource(s) failed to delete: [{names}]. "
            ) if failed else self.becomes("DELETE_COMPLETE")

        remove(self, doomed, over)


def remove(
    stack: Stack,
    doomed: Mapping[str, Resource],
    over: Callable[[bool], None],
    on_create: bool = False,
) -> None:
    """Deletes resources, those first that others need not; then `over`, with whether one could not be."""
    left, tries, failed = dict(doomed), dict.fromkeys(doomed, 0), set[str]()
    account, begun = stack.account, set[str]()
    template = {name.strip(): row for name, row in stack.template["Resources"].items()} | (
        stack.before[0]["Resources"] if stack.before else {}
    )

    wants = {name: needs(row, set(template)) for name, row in template.items()}

    def held_by(name: str, others: Iterable[str]) -> bool:
        return any(
            name.strip() in wants.get(other.strip(), ()) for other in others if other != name
        )

    def go() -> None:
        while stuck := [
            name for name in left if name not in begun | failed and held_by(name, failed)
        ]:
            failed.update(stuck)  # what needs it stays, and so must it
        for name, resource in list(left.items()):
            if name in begun | failed or held_by(name, left):
                continue
            begun.add(name)
            kept = resource.policy == "Retain" or (
                resource.policy == "RetainExceptOnCreate" and not on_create
            )
            if kept or not resource.physical:
                left.pop(name)
                if kept:
                    stack.say(name.strip(), resource.physical, resource.type, "DELETE_SKIPPED")
                    resource.status = "DELETE_COMPLETE"
                account.later(0.0, go)
                continue
            stack.say(name.strip(), resource.physical, resource.type, "DELETE_IN_PROGRESS")
            account.later(2.0, lambda name=name, resource=resource: attempt(name, resource))  # type: ignore[misc]
        if not set(left) - failed and not finished:
            finished.append(True)
            over(bool(failed))

    finished: list[bool] = []

    def attempt(name: str, resource: Resource) -> None:
        try:
            if (
                account.stuck.get(resource.type, 0) > 0
                and getattr(account.things.get(resource.physical), "state", "terminated")
                != "terminated"
            ):
                account.stuck[resource.type] -= 1
                tries[name] = TRIES
                raise Refused(
                    "DependencyViolation", f"resource {resource.physical} has a dependent object"
                )
            identity.handle(account, stack.name, resource.type, "delete", resource.properties)
            gone = resources.remove(account, resource.type, resource.physical, resource.properties)
        except Refused as refused:
            tries[name] += 1
            if tries[name] < TRIES:
                return account.later(TRY_AGAIN, lambda: attempt(name, resource))
            resource.status, resource.reason = "DELETE_FAILED", refused.message
            stack.say(
                name.strip(),
                resource.physical,
                resource.type,
                "DELETE_FAILED",
                f"{refused.message} (Service: Ec2, Status Code: 400, Request ID: 0)",
            )
            failed.add(name)
            return go()
        if not gone:
            return account.later(10.0, lambda: attempt(name, resource))
        resource.status = "DELETE_COMPLETE"
        stack.say(name.strip(), resource.physical, resource.type, "DELETE_COMPLETE")
        left.pop(name)
        go()

    go()


# Requests


def stacks(account: Account) -> dict[str, Stack]:
    """Stack id → stack, also those that are deleted."""
    return account.stacks


def find(account: Account, name: str) -> Stack:
    for stack in stacks(account).values():
        if stack.arn == name or (stack.name == name and stack.status != "DELETE_COMPLETE"):
            return stack
    raise Refused("ValidationError", f"Stack with id {name} does not exist")


def _checked(
    template_body: str,
    parameters: Iterable[Mapping[str, Any]],
    before: Mapping[str, str],
    capabilities: Iterable[str],
) -> tuple[dict[str, Any], dict[str, str]]:
    if len(template_body.encode()) > LONGEST:
        raise Refused(
            "ValidationError",
            f"1 validation error detected: Value at 'templateBody' failed to satisfy constraint: Member must have length less than or equal to {LONGEST}",
        )
    template = json.loads(template_body)
    declared, values = template.get("Parameters", {}), {}
    for row in parameters:
        values[row["ParameterKey"]] = (
            before[row["ParameterKey"]] if row.get("UsePreviousValue") else row["ParameterValue"]
        )
    if unknown := set(values) - set(declared):
        raise Refused(
            "ValidationError",
            f"Parameters: [{', '.join(sorted(unknown))}] do not exist in the template",
        )
    values = {
        name: str(row["Default"]) for name, row in declared.items() if "Default" in row
    } | values
    if missing := set(declared) - set(values):
        raise Refused(
            "ValidationError", f"Parameters: [{', '.join(sorted(missing))}] must have values"
        )
    types = {row["Type"] for row in template["Resources"].values()}
    if types & {"AWS::IAM::Role", "AWS::IAM::InstanceProfile"} and not set(capabilities) & {
        "CAPABILITY_IAM",
        "CAPABILITY_NAMED_IAM",
    }:
        raise Refused(
            "InsufficientCapabilitiesException", "Requires capabilities : [CAPABILITY_NAMED_IAM]"
        )
    names = set(template["Resources"])
    for row in template["Resources"].values():
        resources.known(row["Type"])
        needs(row, names)
    return template, values


@answers("cloudformation", "CreateStack")
def create_stack(account: Account, StackName: str, TemplateBody: str, Parameters: Any = (), Tags: Any = (), Capabilities: Any = (),
                 OnFailure: str = "ROLLBACK", ClientRequestToken: str = "", **_: Any) -> dict[str, Any]:  # fmt: skip
    for stack in stacks(account).values():
        if stack.name == StackName and stack.status != "DELETE_COMPLETE":
            if ClientRequestToken and stack.token == ClientRequestToken:
                return {"StackId": stack.arn}
            raise Refused("AlreadyExistsException", f"Stack [{StackName}] already exists")
    template, values = _checked(TemplateBody, Parameters, {}, Capabilities)
    arn = f"arn:aws:cloudformation:{account.region}:{account.number}:stack/{StackName}/{account.new_id('')}"
    stack = stacks(account)[arn] = Stack(
        account,
        StackName,
        arn,
        template,
        values,
        tags_of(Tags),
        account.now,
        OnFailure,
        ClientRequestToken,
    )
    stack.becomes("CREATE_IN_PROGRESS", "User Initiated")
    stack.advance()
    return {"StackId": arn}


@answers("cloudformation", "UpdateStack")
def update_stack(account: Account, StackName: str, TemplateBody: str, Parameters: Any = (), Tags: Any = (), Capabilities: Any = (),
                 **_: Any) -> dict[str, Any]:  # fmt: skip
    stack = find(account, StackName)
    if not stack.status.endswith("_COMPLETE") or stack.status in (
        "ROLLBACK_COMPLETE",
        "DELETE_COMPLETE",
    ):
        raise Refused(
            "ValidationError",
            f"Stack:{stack.arn} is in {stack.status} state and can not be updated.",
        )
    template, values = _checked(TemplateBody, Parameters, stack.parameters, Capabilities)
    same = lambda: json.dumps([stack.template, stack.parameters, stack.tags], sort_keys=True)  # noqa: E731
    now, before, tags = same(), (stack.template, stack.parameters), stack.tags
    stack.template, stack.parameters, stack.tags = template, values, tags_of(Tags) or stack.tags
    if same() == now:
        stack.template, stack.parameters, stack.tags = *before, tags
        raise Refused("ValidationError", "No updates are to be performed.")
    stack.before, stack.failed, stack.made, stack.old = before, False, [], {}
    wanted = stack.wanted
    stack.old = {
        name: stack.resources.pop(name) for name in list(stack.resources) if name not in wanted
    }
    for resource in stack.resources.values():
        resource.status = "WAITING"
    stack.becomes("UPDATE_IN_PROGRESS", "User Initiated")
    stack.advance()
    return {"StackId": stack.arn}


@answers("cloudformation", "CancelUpdateStack")
def cancel_update(account: Account, StackName: str, **_: Any) -> dict[str, Any]:
    stack = find(account, StackName)
    if stack.status != "UPDATE_IN_PROGRESS":
        raise Refused(
            "ValidationError",
            f"CancelUpdateStack cannot be called from current stack status {stack.status}",
        )
    stack.failed = True
    for name in sorted(stack.doing):
        stack.marks(name, "CREATE_FAILED", "Resource creation cancelled")
    stack.doing.clear()
    stack._roll_back("User Initiated")
    return {}


@answers("cloudformation", "DeleteStack")
def delete_stack(
    account: Account, StackName: str, RetainResources: Iterable[str] = (), **_: Any
) -> dict[str, Any]:
    try:
        stack = find(account, StackName)
    except Refused:
        return {}  # as CloudFormation: what is not there is deleted
    if stack.status in (
        "UPDATE_IN_PROGRESS",
        "UPDATE_ROLLBACK_IN_PROGRESS",
        "UPDATE_COMPLETE_CLEANUP_IN_PROGRESS",
    ):
        raise Refused(
            "ValidationError",
            f"Stack [{stack.arn}] cannot be deleted while in status {stack.status}",
        )
    if stack.status not in ("DELETE_IN_PROGRESS", "DELETE_COMPLETE"):
        if list(RetainResources) and stack.status != "DELETE_FAILED":
            raise Refused(
                "ValidationError",
                f"Invalid operation on stack [{stack.arn}]. You can't retain resources",
            )
        stack.delete(RetainResources)
    return {}


@answers("cloudformation", "DescribeStacks")
def describe_stacks(account: Account, StackName: str = "", **_: Any) -> dict[str, Any]:
    chosen = (
        [find(account, StackName)]
        if StackName
        else [s for s in stacks(account).values() if s.status != "DELETE_COMPLETE"]
    )
    return {"Stacks": [_described(stack) for stack in chosen]}


def _described(stack: Stack) -> dict[str, Any]:
    row = {"StackId": stack.arn, "StackName": stack.name, "StackStatus": stack.status, "CreationTime": moment_of(stack.since),
           "Tags": tag_list(stack.tags), "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in stack.parameters.items()]}  # fmt: skip
    if stack.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"):
        outputs = stack.template.get("Outputs", {})
        resolver = stack.resolver()
        row["Outputs"] = [{"OutputKey": key, "OutputValue": str(resolver.value(out["Value"]))} for key, out in outputs.items()
                          if "Condition" not in out or resolver.holds(out["Condition"])]  # fmt: skip
    return row | ({"StackStatusReason": stack.reason} if stack.reason else {})


@answers("cloudformation", "DescribeStackEvents")
def describe_events(account: Account, StackName: str, **_: Any) -> dict[str, Any]:
    return {"StackEvents": find(account, StackName).events[::-1]}


@answers("cloudformation", "ListStackResources")
def list_resources(account: Account, StackName: str, **_: Any) -> dict[str, Any]:
    rows = find(account, StackName).resources
    return {"StackResourceSummaries": [
        {"LogicalResourceId": name, "PhysicalResourceId": row.physical, "ResourceType": row.type, "ResourceStatus": row.status,
         "LastUpdatedTimestamp": moment_of(account.now), **({"ResourceStatusReason": row.reason} if row.reason else {})}
        for name, row in rows.items()]}  # fmt: skip


@answers("cloudformation", "GetTemplate")
def get_template(account: Account, StackName: str, **_: Any) -> dict[str, Any]:
    return {
        "TemplateBody": json.loads(json.dumps(find(account, StackName).template)),
        "StagesAvailable": ["Original", "Processed"],
    }
