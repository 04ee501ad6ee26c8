"""File storage in folders and S3, and uploads from nodes to AWS: their folders to S3 and
their logs to CloudWatch.
"""
