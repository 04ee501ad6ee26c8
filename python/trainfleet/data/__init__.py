"""From text to batches: sources → tokenizer → shards → order.

sources     where the text is, and how it is cut into units of work        (light: no torch, no numpy)
documents   the texts of a unit, read in bounded memory                    (light)
dataset     the finished set: its manifest, and batches of its samples     (light until the first batch)
progress    what the nodes have done so far                                (light)
tokenizer   one encoder over several libraries, checked against one reference
bpe         a byte-level BPE trained on a bounded sample
shards      token files: Megatron .bin/.idx and their checksums
order       which tokens sample g is: a bijection, no index in memory
job         one node's part of `make tokenize`                             (python -m trainfleet.data)
"""
