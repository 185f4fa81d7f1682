"""Pure integer plans: no torch.distributed, no graphs."""
