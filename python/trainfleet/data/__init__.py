"""From text to batches: sources → tokenizer → shards → order.

sources     where the text is, and how it is cut into units of work        (light: no torch, no
            numpy)
documents   the texts of a unit, read in bounded memory                    (light; formats,
            source_files, hub)
dataset     the finished set: its manifest, and batches of its samples     (light until the first
            batch)
progress    what the nodes have done so far                                (light)
tokenizer   one definition, whatever it was made from (conversion, bpe)
encoders    the libraries that turn texts into ids, checked against one reference (words: WordPiece)
shards      token files: Megatron .bin/.idx and their checksums (store: on disk or in S3)
shuffling   which tokens sample g is: a bijection, no index in memory
masking     samples with tokens hidden, for BERT and RoBERTa
job         one node's part of `make tokenize`                             (python -m
            trainfleet.data; units, lock)
"""
