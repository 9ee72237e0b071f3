"""BERT pretraining on DeepSpeed's pipeline engine."""

__version__ = "0.1.0"
