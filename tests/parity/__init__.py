"""Every accepted layout against one process on the same weights, after whole sampling runs."""
