"""Turns text sources into training batches: sources → tokenizer → shards → sample order.

sources     lists the text and divides it into units of work               (light: no torch, no
            numpy)
documents   reads the texts of a unit in bounded memory                    (light; formats,
            source_files, hub_datasets)
dataset     the finished dataset: its manifest, and batches of its samples (light until the first
            batch)
progress    progress of all nodes                                          (light)
tokenizer   one tokenizer definition, from any supported format (conversion, bpe)
encoders    libraries that turn texts into ids, checked against one reference
shards      token files (Megatron .bin/.idx): writing, reading, caching, checking (dataset_store:
            on disk or in S3)
shuffling   maps sample number g to its tokens by a bijection, with no index in memory
masking     samples with masked tokens, for BERT and RoBERTa
__main__    one node's part of `make tokenize`                             (python -m
            trainfleet.data; work_units)
"""
