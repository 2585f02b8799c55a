"""Measuring students on held-out rows: the tables of phase=evaluate and of the recipes, and what training heads reports.

recall.py (heads beside trivial baselines), head_report.py (before and after a training of heads), samples.py (text);
against the teacher: bench.py (models, rows and stages), stages.py (those of a training), quality.py (losses, divergences,
answers), drift.py (features in decoding), overlap.py (experts of neighbouring tokens), merging.py and survival.py (what
requantising leaves of a LoRA).
"""
