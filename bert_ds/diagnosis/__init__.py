"""What would go wrong on this machine, found before a run: one small function a check."""
