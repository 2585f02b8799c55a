"""Experts, from bytes on the disk to a matmul (docs/streaming.md). Nothing here knows what a router or a step is."""
