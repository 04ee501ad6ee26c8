"""The images that jobs run in: their recipes, their builds, and their pushes to ECR under a tag of
their content.

image_recipe.py  arguments, tag and changed layers, from the lock, docker/Dockerfile and the code.
                 Pure
builders.py      docker, podman or buildah: which one works here, and its commands
building.py      make build: the image of a recipe, built if missing
ecr.py           make push: AWS's registry
"""
