"""Container images for jobs: recipes, builds, and pushes to ECR with content-based tags.

builders.py:  an image's build arguments, tag and changed layers, derived from the lock,
              docker/Dockerfile and the code; docker, podman and buildah command lines
building.py:  `make build`, which builds a recipe's image if it is missing
ecr.py:       `make push`, which pushes the image to ECR, and image pulls on hosts
"""
