"""Runs in an environment that has aws-parallelcluster: `python pcluster_stack.py CLUSTER.yaml TYPES.json.gz` asks nobody.

Prints a JSON object: `types`, the resources of the stacks that ParallelCluster renders from the cluster file (type → the
properties that any of them sets); `requests`, what its code sends to AWS for such a cluster, as `client:operation`. TYPES is
DescribeInstanceTypes' answer by name, which moto carries.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(
    AWS_DEFAULT_REGION="us-west-2",
    AWS_ACCESS_KEY_ID="x",
    AWS_SECRET_ACCESS_KEY="x",
    AWS_MAX_ATTEMPTS="1",
)
os.environ["JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION"] = "1"

import pcluster
import yaml
from pcluster.aws.aws_api import AWSApi
from pcluster.aws.aws_resources import InstanceTypeInfo
from pcluster.models.s3_bucket import S3Bucket
from pcluster.schemas.cluster_schema import ClusterSchema
from pcluster.templates import cdk_artifacts_manager
from pcluster.templates.cdk_builder import CDKTemplateBuilder

CODE = Path(pcluster.__file__).parent
# Of clusters: not of images, login nodes, AWS Batch, EFS, exported logs, or the API that pcluster can be.
ROOMS = ("models/cluster.py", "models/cluster_resources.py", "models/s3_bucket.py", "config/*.py", "validators/*.py", "schemas/*.py",
         "templates/*.py", "api/controllers/cluster_*.py", "models/compute_fleet_status_manager.py")  # fmt: skip
CLIENTS = {"cfn": "cloudformation", "s3_resource": "s3", "ddb_resource": "dynamodb"}
VERSIONS = ("list_object_versions", "delete_objects")
RESOURCES = {  # what boto3 sends for a resource's methods
    "get_item": ("get_item",), "put_item": ("put_item",), "update_item": ("update_item",), "download_file": ("get_object",),
    "get_objects": ("list_objects",), "is_empty": ("list_objects",), "delete_objects": ("list_objects", "delete_objects"),
    "delete_object": VERSIONS, "delete_object_versions": VERSIONS,
}  # fmt: skip


def rendered(file: Path, types: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of the cluster: its own and those inside it."""
    aws, name = mock.MagicMock(), "bert-large-trn1"
    aws.ec2.get_instance_type_info.side_effect = lambda kind: InstanceTypeInfo(types[kind])
    aws.ec2.get_official_image_id.return_value = "ami-0123456789abcdef0"
    aws.ec2.get_subnet_vpc.return_value = "vpc-0123456789abcdef0"
    aws.ec2.get_subnets_az_mapping.side_effect = lambda ids: dict.fromkeys(ids, "us-west-2a")
    aws.ec2.get_subnet_avail_zone.return_value = "us-west-2a"
    image = mock.MagicMock(
        root_volume_size=40, id="ami-0", device_name="/dev/sda1", platform="Linux/UNIX"
    )
    aws.ec2.describe_image.return_value = image
    aws.ec2.get_supported_architectures.return_value = ["x86_64"]
    aws.ec2.describe_capacity_reservations.return_value = (
        aws.fsx.get_file_systems_info.return_value
    ) = []
    aws.sts.get_account_id.return_value = "123456789012"
    AWSApi.instance = staticmethod(lambda: aws)
    said = yaml.safe_load(file.read_text())
    config = ClusterSchema(cluster_name=name).load(said)
    config.source_config, config.config_version = said, "v"
    artifacts = f"parallelcluster-{'0' * 16}-v1-do-not-delete"
    bucket = S3Bucket(name=artifacts, service_name=name, stack_name=name, artifact_directory="x")
    inside: list[dict[str, Any]] = []

    def keep(
        manager: cdk_artifacts_manager.CDKArtifactsManager, bucket: S3Bucket
    ) -> dict[str, Any]:
        assembly = manager.cluster_cdk_assembly
        folder = Path(assembly.get_cloud_assembly_directory())
        inside.extend(
            json.loads((folder / asset.path).read_text()) for asset in assembly.get_assets()
        )
        return {}

    with mock.patch.object(cdk_artifacts_manager.CDKArtifactsManager, "upload_assets", keep):
        whole, _ = CDKTemplateBuilder.build_cluster_template(
            config, bucket, name, f"/aws/parallelcluster/{name}-0"
        )
    return [whole, *inside]


def kinds(templates: list[dict[str, Any]]) -> dict[str, list[str]]:
    found = defaultdict[str, set[str]](set)
    for template in templates:
        for made in template["Resources"].values():
            found[made["Type"]] |= made.get("Properties", {}).keys()
    return {kind: sorted(names) for kind, names in sorted(found.items())}


def requests() -> Iterator[str]:
    """What the methods of pcluster.aws that code for clusters calls send."""
    texts = [path.read_text() for room in ROOMS for path in CODE.glob(room)]
    called = {
        match for text in texts for match in re.findall(r"AWSApi\.instance\(\)\.(\w+)\.(\w+)", text)
    }
    for name, method in sorted(called):
        for operation in sorted(
            RESOURCES[method] if name.endswith("_resource") else _sent(name, method, set())
        ):
            yield f"{CLIENTS.get(name, name)}:{operation}"


def _sent(name: str, method: str, seen: set[str]) -> set[str]:
    tree, found = ast.parse((CODE / f"aws/{name}.py").read_text()), set[str]()
    seen.add(method)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == method:
            text = ast.unparse(node)
            found |= set(re.findall(r"self\._client\.([a-z_]+)", text)) - {"meta", "get_paginator"}
            found |= set(re.findall(r"get_paginator\('([a-z_]+)'\)", text))
            for other in set(re.findall(r"self\.([a-z]\w*)", text)) - seen:
                found |= _sent(name, other, seen)
    return found


if __name__ == "__main__":
    cluster, types = Path(sys.argv[1]), json.loads(gzip.decompress(Path(sys.argv[2]).read_bytes()))
    print(json.dumps({"requests": list(requests()), "types": kinds(rendered(cluster, types))}))
