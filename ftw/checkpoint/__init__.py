"""An opened checkpoint of any format: its tensors, its configuration, and what the names of its tensors mean."""
