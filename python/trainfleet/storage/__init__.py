"""S3 and CloudWatch: the one door to S3, and a node's folders and log on their way there."""
