"""Speed, memory and truth of a loaded engine: `bench`, `ab` (arms side by side), `verify`, `doctor`."""
