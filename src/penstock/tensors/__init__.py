"""What crosses a boundary: trees of tensors, plain values, and their wire format."""
