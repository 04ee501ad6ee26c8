"""All access to S3 and CloudWatch: S3 objects, and the synchronization of a node's folders and
log.
"""
