"""The images that jobs run in: their recipes, built by the builder at hand, and pushed to ECR under
a tag of their content.

image_recipe.py    from the lock, docker/Dockerfile and the code: arguments, tag, and which layers
                   change. Pure
builders.py  docker, podman or buildah: which one works here, and its words
building.py  make build: the image of a recipe, unless it is there
ecr.py       make push: AWS's registry
"""
