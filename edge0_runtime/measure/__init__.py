"""What is measured on a loaded engine, or on the machine below it: verify, bench, arms side by side, memory, disk."""
