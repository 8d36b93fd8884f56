"""Lower precision: range collection, Q/DQ placement, weight storage, sensitivity."""
