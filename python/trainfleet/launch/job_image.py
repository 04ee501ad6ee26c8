"""Builds a config's container image, pushes it to a registry, and resolves its full name for the
plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ..backends import BACKENDS
from ..cloud.calls import Calls, region_of
from ..cloud.cloudformation import CREATED
from ..cloud.repository import BUILD, NAME, held_as
from ..cloud.template_inputs import own_tags
from ..config import Config
from ..hosts import platform
from ..hosts.install_steps import lock_name
from ..hosts.platform import load_platform
from ..hosts.tar import code_files
from ..images import building
from ..images.builders import ARCHITECTURE, Builder, FoundImage, ImageRecipe, choose, recipe_of
from ..images.ecr import Registry
from ..trust.errors import CloudError, ConfigError, ImageError

NONE = "none"  # value of fleet.container for jobs without an image


def recipe_for(config: Config) -> ImageRecipe:
    """Returns the image recipe for this config's platform."""
    fleet = config.fleet
    recipe = recipe_of(
        load_platform(fleet.platform), fleet.container_base or "", code_files(fleet.backend)
    )
    return replace(recipe, arguments=(*recipe.arguments, *BACKENDS[fleet.backend].image_arguments))


def registry_for(config: Config) -> Registry:
    """Returns the current AWS account's registry in the fleet's region."""
    calls = Calls(region_of(config))
    return Registry(calls, str(calls("sts", "GetCallerIdentity")["Account"]))


def named(config: Config, given: Sequence[str] = ()) -> Config:
    """Returns the config with fleet.container `build` replaced by the image's full name. Prefers
    the first image in `given` (from existing requests) over the name in ECR.

    Without AWS credentials, the name contains ACCOUNT as a placeholder. That is enough for a plan,
    because `make_ready` runs before any job.
    """
    if config.fleet.container != BUILD:
        return config
    tag = held_as(config.fleet_name, recipe_for(config).tag)
    try:
        image = next(iter(given), "") or registry_for(config).name(tag)
    except (CloudError, ConfigError):
        image = f"ACCOUNT.dkr.ecr.{config.fleet.aws.region or 'REGION'}.amazonaws.com/{NAME}:{tag}"
    return replace(config, fleet=replace(config.fleet, container=image))


def make_ready(config: Config) -> None:
    """Ensures that a job's image is in the registry and fits its nodes.

    Raises:
        CloudError, ImageError: the image is missing or does not fit.
    """
    if config.fleet.container == BUILD:
        provide(config)
    elif config.fleet.container != NONE:
        require_image(config)


def build(config: Config) -> int:
    """Builds the image (make build). Returns the exit code."""
    recipe, builder = _begin(config)
    building.build(recipe, builder, building.commit_of(), print)
    more = (
        ""
        if config.fleet.container == BUILD
        else f" SET='fleet.container=build', or set fleet.container: {recipe.reference}"
    )
    print(f"next: make push{more}")
    return 0


def push(config: Config) -> int:
    """Builds and pushes the image if the registry lacks it (make push). Returns the exit code."""
    name = provide(config)
    first = "" if config.fleet.container == BUILD else f"set fleet.container: {name}, then "
    print(f"next: {first}make train")
    return 0


def provide(config: Config) -> str:
    """Builds and pushes the config's image if its registry lacks it. Returns the image's full
    name.
    """
    registry, recipe = registry_for(config), recipe_for(config)
    if registry.holder(recipe.tag) is None:
        recipe, builder = _begin(config)
        building.build(recipe, builder, building.commit_of(), print)
    else:
        builder = Builder("")  # No image is built, so no builder is needed.
    tags = own_tags(config.fleet_name) | {CREATED: time.strftime("%Y-%m-%d")}
    return registry.push(recipe, builder, print, tags, config.fleet_name)


def _begin(config: Config) -> tuple[ImageRecipe, Builder]:
    platform.require_pins(platform.pins_of(config, "", builds=True))
    recipe, (builder, why) = recipe_for(config), choose()
    print(
        f"{recipe.platform} image {recipe.tag}, from {recipe.base}, built by "
        f"{builder.name}{f' ({why})' if why else ''}"
    )
    return recipe, builder


def require_image(config: Config) -> None:
    """Checks the image's stored configuration in ECR before a job starts. Accepts images from other
    registries unchecked.

    Raises:
        ImageError: the image is missing, or its processor architecture or lock file does not match
            the config.
    """
    image = config.fleet.container
    registry = Registry.of(image)
    if registry is None:
        return
    _, at, digest = image.partition("@")
    tag = digest if at else image.rpartition("/")[2].partition(":")[2] or "latest"
    stored = registry.find(tag)
    if stored is None:
        raise ImageError(
            "the image is not in the registry",
            where=image,
            why=f"the repository {registry.repository} does not have this tag",
            next="make push",
        )
    require_fit(config, stored, image)


def require_fit(config: Config, stored: FoundImage, image: str) -> None:
    """Raises ImageError if the image's processor architecture or lock file does not match the
    config.
    """
    then = "set fleet.container: build, then run make push"
    if stored.architecture != ARCHITECTURE:
        why = (
            f"it is built for {stored.architecture}, but "
            f"{config.fleet.instance_type or 'the fleet'} is {ARCHITECTURE}"
        )
        raise ImageError(
            "the image is built for another processor architecture", where=image, why=why, next=then
        )
    platform = load_platform(config.fleet.platform)
    theirs, ours = stored.labels.get("trainfleet.lock"), lock_name(platform)
    if theirs and theirs != ours:
        why = f"it was built from lock {theirs}, but platform {platform.name} is at lock {ours}"
        raise ImageError(
            "the image's versions differ from those of the config's platform",
            where=image,
            why=why,
            next=then,
        )
