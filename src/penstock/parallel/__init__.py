"""Data parallelism and tensor parallelism beside the pipeline: DDP, FSDP2, DTensor."""
