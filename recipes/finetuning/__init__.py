"""What the fine-tuning recipes share."""
