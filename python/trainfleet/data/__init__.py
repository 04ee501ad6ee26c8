"""From text to batches: sources → tokenizer → shards → order.

sources     where the text is, and how it is cut into units of work        (light: no torch, no
            numpy)
documents   the texts of a unit, read in bounded memory                    (light; formats,
            source_files, hub_datasets)
dataset     the finished set: its manifest, and batches of its samples     (light until the first
            batch)
progress    the nodes' progress so far                                     (light)
tokenizer   one definition, from any form of it (conversion, bpe)
encoders    the libraries that turn texts into ids, checked against one reference
shards      token files: Megatron .bin/.idx, read, cached and checked (dataset_store: on disk or in
            S3)
shuffling   which tokens sample g has: a bijection, no index in memory
masking     samples with hidden tokens, for BERT and RoBERTa
__main__    one node's part of `make tokenize`                             (python -m
            trainfleet.data; work_units)
"""
