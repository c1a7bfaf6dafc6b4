"""How nonconforming each training point and each candidate is."""
