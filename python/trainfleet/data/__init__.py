"""Data pipeline that turns text sources into training batches: sources → tokenizer → shards →
order.

Modules marked "light" import neither torch nor numpy.

sources     lists the source files and divides them into units of work    (light)
documents   reads a unit's texts in bounded memory                        (light; formats,
            source_files, hub_datasets)
dataset     reads sample batches from a finished dataset                  (light until the first
            batch)
progress    reports the progress of all nodes                             (light)
tokenizer   loads a tokenizer from any supported format                   (conversion, bpe)
encoders    wraps the encoder libraries, checked against a reference library
shards      writes, reads, caches and verifies Megatron .bin/.idx files   (dataset_store: on disk
            or in S3)
shuffling   maps sample number g to its tokens by a bijection, without a stored index
chat        renders conversations and marks the tokens to learn              (light)
packing     packs whole conversations into rows
masking     builds masked samples for BERT and RoBERTa
__main__    runs one node's share of `make tokenize`                      (python -m
            trainfleet.data; work_units)
"""
