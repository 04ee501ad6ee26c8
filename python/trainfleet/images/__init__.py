"""Container images for jobs: recipes, builds, and pushes to ECR with content-based tags.

builders.py:  image arguments, tag and changed layers, from the lock, docker/Dockerfile and code;
              selection and command lines of docker, podman and buildah
building.py:  `make build`, which builds a recipe's image if it is missing
ecr.py:       `make push`, which pushes the image to ECR, and how hosts pull it
"""
