"""Benchmark of the integrations: FSDP2 against torch's hybrid sharding, and the Trainer against its DDP."""
