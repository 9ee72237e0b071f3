"""The checkpoint format: files and folders only, no process group.

`format` says what checkpoint.json holds, `writer` and `reader` move tensors, `files` is the only place that syncs and
renames, `run_config` and `parameters` tie a checkpoint to a model.
"""
