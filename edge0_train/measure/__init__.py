"""Measuring a student against its teacher on held-out rows; phase=evaluate and recipes/paper_claims build tables from it.

bench.py (models, rows and stages), quality.py (losses, divergences, answers), routing.py (recall, drift, overlap), merging.py
(what requantising leaves of a LoRA).
"""
