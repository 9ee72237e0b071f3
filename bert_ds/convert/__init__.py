"""Conversion of checkpoints; needs neither DeepSpeed nor a GPU. `python -m bert_ds.convert` is the command."""
