"""Container images for jobs: their recipes, builds, and pushes to ECR with content-based tags.

image_recipe.py:  arguments, tag and changed layers, from the lock, docker/Dockerfile and the code
builders.py:      selection and commands of docker, podman or buildah
building.py:      make build, which builds the image of a recipe if it is missing
ecr.py:           make push, which uploads the image to AWS's registry
"""
