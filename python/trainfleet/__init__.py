"""trainfleet: one config.yaml and make, from bare nodes to a trained language model."""

__version__ = "0.2.0"
