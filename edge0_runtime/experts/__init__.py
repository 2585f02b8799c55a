"""From disk bytes to a matmul: where experts lie, who reads them, the slots they are in, the layer that computes from them."""
