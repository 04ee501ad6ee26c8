"""S3 and CloudWatch: the one way to S3, and the sync of a node's folders and log."""
