"""Words of a training's command line that nobody would write on purpose, as a strategy of Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from edge0_train.config import PHASES, all_settings

LONG, DEEP = "y" * 100_000, "[" * 2000
VALUES = (
    "", "null", "true", "false", "0", "-1", "1", "7", "2.5", "1e-39", "1e300", "1e999", "inf", "nan", "9" * 400, "9" * 5000,
    "0x10", "1_000", "x", "''", "'", '"', "\\", "[", "]", "[]", "[[1]]", "[1,2", "{", "{}", "{a:1}", "{a:{b:[c]}}", "1,2", "a,b,",
    ",", "choice(1,2)", "range(1,100000000)", "glob(*)", "interval(0,1)", "${", "${root}", "${nothing}", "${oc.env:HOME}",
    "${oc.env:NOTHING}", "${asset:x}", "${now:%Y}", "${optim.lr}", "${.lr}", "???", "$", "%s", "{0}", "a=b", "a b", "#", "# x",
    "!!python/object:x", "../../x", "/dev/zero", "/proc/self/mem", "prompts/saved", "run", "run/base", "teacher", "\x1b[31m",
    "\u202e", "e\u0301", "\udcff", "\U0001f4a5", "\n", "\t", LONG, DEEP, "[" + "1," * 50_000 + "]", "{" * 500, "auto", "tasks",
    "tasks:", "tasks:x", "cuda", "cuda:999", "own", "nano", "all", "evaluate",
)  # fmt: skip
"""Of settings; whatever is meant, it is refused or has a sense."""
FLAGS = ("-m", "--multirun", "--cfg", "job", "--cfg=job", "--help", "--info", "--resolve", "--package", "--version", "-c", "-x",
         "--", "=", "x")  # fmt: skip
FIELDS = ("tier.k", "tier.owners", "tier.consumers.first", "tier.router.kind", "tier.lora.r", "tier.lora.targets", "tier.nothing",
          "tier.architecture", "tier.architecture.vocab_size", "tier", "experiment", "settings/x", "optim", "optim.", ".", "a@b",
          "/x", "a/b")  # fmt: skip
SETTINGS = st.sampled_from([*all_settings()])
NAMES = st.one_of(SETTINGS, SETTINGS, SETTINGS, SETTINGS, st.sampled_from(FIELDS), st.text(max_size=8))
TEXTS = st.one_of(*[st.sampled_from(VALUES)] * 2, st.text(max_size=20), st.floats().map(repr), st.integers().map(str))
OVERRIDES = st.builds(
    "{}{}{}{}".format,
    st.sampled_from([*[""] * 8, "+", "++", "~"]),
    NAMES,
    st.sampled_from([*["="] * 9, "", "=="]),
    TEXTS,
)
NOT_OURS = ("dry_run", "hydra")
"""A plan is enough; and what is told to Hydra is Hydra's own business."""
WORDS = (
    st.one_of(*[OVERRIDES] * 10, st.sampled_from(FLAGS), st.text(max_size=20))
    .map(lambda word: word.replace("\0", ""))
    .filter(lambda word: not word.lstrip("+~").startswith(NOT_OURS))
)
PHASE = st.sampled_from([*PHASES, "all"])
