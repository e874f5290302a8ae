"""All-reduce of device tensors by torch's own groups (NCCL, or gloo), in one launch order that the engine agrees on."""
