"""The group queue leases episodes and hands finished groups to the trainer."""
