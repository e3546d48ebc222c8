"""What no order can beat: what `lower_bound` is made of."""
