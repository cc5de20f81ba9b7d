"""Loading: lookup tables into page-locked memory, other tensors to the device."""
