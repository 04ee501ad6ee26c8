"""The config of a run on Trainium; TYPE stands for the instance type."""

CONFIG = """
name: trn
data: {name: text, sources: [stdlib], vocab_size: 32000}
model: {preset: llama-2-7b}
fleet: {backend: ssh, instance_type: TYPE, nodes: 4, shared_folder: /fsx}
train: {steps: 20, global_batch_size: 1024, sequence_length: 4096, spike_sigmas: 0}
"""
