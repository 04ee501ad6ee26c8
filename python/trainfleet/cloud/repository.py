"""Names the account's image repository and the tags in it, and removes both.

All configs in an account share one repository, because most run the same image. Each config
tags the images that it uses as `<config>.<image>`. ECR deletes an image along
with its last tag (https://docs.aws.amazon.com/AmazonECR/latest/userguide/delete_image.html, read
2026-11-23). So one config's `make clean` never removes an image that another config uses. The
repository is removed with its last image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..config import Config
from .calls import Calls, Row, passing
from .template_inputs import Inputs, slug

NAME = "trainfleet"
HOST = re.compile(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
BUILD = "build"  # fleet.container value for the image that this program builds and pushes
GONE = "RepositoryNotFoundException"


def held_as(config: str, image: str) -> str:
    """Returns the tag that holds an image for a config. ECR allows 128 characters."""
    return f"{slug(config)}.{image}"


def pulled(config: Config, inputs: Inputs) -> str | None:
    """Returns the ARN of the repository that contains the config's image, or None if the image is
    not in ECR.
    """
    image = config.fleet.container
    if image == BUILD:
        return _arn(inputs.partition, inputs.region, inputs.account, NAME)
    host, _, rest = image.partition("/")
    match = HOST.fullmatch(host)
    if match is None:
        return None
    return _arn(inputs.partition, match[2], match[1], rest.partition("@")[0].partition(":")[0])


def _arn(partition: str, region: str, account: str, name: str) -> str:
    return f"arn:{partition}:ecr:{region}:{account}:repository/{name}"


def holders(calls: Calls) -> Iterator[tuple[str, Row]]:
    """Yields each tag in the repository, with its image. Empty if there is no repository."""
    with passing(GONE):
        named = {"repositoryName": NAME, "filter": {"tagStatus": "TAGGED"}}
        for row in calls.pages("ecr", "DescribeImages", "imageDetails", **named):
            yield from ((str(tag), row) for tag in row.get("imageTags", ()))


def release_image(calls: Calls, tag: str, row: Row) -> object:
    """Removes a config's tag, and the repository if no tagged image is left."""
    calls("ecr", "BatchDeleteImage", repositoryName=NAME, imageIds=[{"imageTag": tag}])
    return remove_repository(calls, NAME, row)


def remove_repository(calls: Calls, name: str, row: Row) -> object:
    """Removes the repository and its untagged images, unless the repository has tagged images."""
    with passing(GONE, "RepositoryNotEmptyException"):
        if next(holders(calls), None) is None:
            named = {"repositoryName": name, "filter": {"tagStatus": "UNTAGGED"}}
            for image in list(calls.pages("ecr", "ListImages", "imageIds", **named)):
                calls("ecr", "BatchDeleteImage", repositoryName=name, imageIds=[image])
            calls("ecr", "DeleteRepository", repositoryName=name)
    return None
