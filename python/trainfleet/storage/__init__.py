"""Files in folders and in S3, and everything that a node sends to AWS: its folders to S3, its log
to CloudWatch.
"""
