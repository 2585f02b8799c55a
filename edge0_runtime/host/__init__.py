"""What this machine has and gives: memories, and the disk at the engine's own reads."""
