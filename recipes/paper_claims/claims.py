"""The paper's claims (docs/method.md 1.6, 2, 3) as one number a seed each, and whether the table bears them out.

A claim holds if its number lies beyond the threshold by more than the uncertainty, does not hold if it lies short of it by more,
and is undecided otherwise. Uncertainty is the sample standard deviation over seeds, but at least the claim's `noise`; from one
seed only that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Rows = Mapping[str, Mapping[str, float]]
"""One seed's table: {arm: {metric: value}}."""


@dataclass(frozen=True)
class Claim:
    """One statement.

    Attributes:
        text: the statement. number: what `value` computes, in words.
        value: one seed's rows -> its number; KeyError when an arm is missing. None: cannot be measured on nano.
        above, below: the threshold and the side on which the claim holds; one of them.
        noise: what the number can be wrong by for want of rows or luck, whatever the seeds say.
        ours: not the paper's claim but this project's, or a question that the paper leaves open.
    """

    text: str
    number: str
    value: Callable[[Rows], float] | None = None
    above: float | None = None
    below: float | None = None
    noise: float = 0.0
    ours: bool = False


@dataclass(frozen=True)
class Verdict:
    """What the seeds say of a claim: holds | does not hold | undecided | not measured | not measurable here."""

    claim: Claim
    verdict: str
    values: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Over the seeds; a claim without a value has none (statistics.StatisticsError)."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Sample standard deviation over the seeds."""
        return spread(self.values)

    def line(self) -> str:
        """One line of text."""
        if not self.values:
            return f"{self.verdict:<20} {self.claim.text}  [{self.claim.number}]"
        bound = f"> {self.claim.above:g}" if self.claim.above is not None else f"< {self.claim.below:g}"
        seeds = f"{len(self.values)} seed{'s' * (len(self.values) > 1)}"
        numbers = f"{self.claim.number} = {self.mean:.4g} +- {self.spread:.2g}, {seeds}; holds if {bound}"
        return f"{self.verdict:<20} {self.claim.text}  [{numbers}]"


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def judge(claim: Claim, seeds: Sequence[Rows]) -> Verdict:
    """See the module's docstring; a seed that lacks an arm does not count."""
    if claim.value is None:
        return Verdict(claim, "not measurable here")
    values: list[float] = []
    for rows in seeds:
        try:
            values.append(claim.value(rows))
        except KeyError:
            continue
    if not values:
        return Verdict(claim, "not measured")
    mean, width = statistics.fmean(values), max(spread(values), claim.noise)
    if claim.above is not None:
        margin = mean - claim.above
    else:
        assert claim.below is not None
        margin = claim.below - mean
    word = "holds" if margin - width > 0 else "does not hold" if margin + width < 0 else "undecided"
    return Verdict(claim, word, tuple(values))


def ratio(metric: str, worse: str, better: str) -> Callable[[Rows], float]:
    """worse's metric over better's: above 1 if `better` is closer to the teacher."""
    return lambda rows: rows[worse][metric] / rows[better][metric]


def gain(metric: str, better: str, worse: str) -> Callable[[Rows], float]:
    """better's metric less worse's."""
    return lambda rows: rows[better][metric] - rows[worse][metric]


def of(arm: str, metric: str) -> Callable[[Rows], float]:
    """One arm's metric as it is."""
    return lambda rows: rows[arm][metric]


KL_NOISE = 0.03
"""Two seeds of one recipe differ by about that much in their ratio of divergences."""
MATCH_NOISE = 0.02
"""Standard error of an exact match of .9 at 256 rows."""


def _closer(text: str, worse: str, better: str, ours: bool = False) -> Claim:
    return Claim(text, f"KL {worse} / {better}", ratio("kl", worse, better), above=1.0, noise=KL_NOISE, ours=ours)


def _answers(text: str, better: str, worse: str, ours: bool = False, above: float = 0.0) -> Claim:
    number = f"exact match {better} - {worse}"
    return Claim(text, number, gain("exact_match", better, worse), above=above, noise=MATCH_NOISE, ours=ours)


CLAIMS = (
    # phases and their order
    _closer("heads must be distilled: untrained ones break the model", "untrained", "heads"),
    Claim(
        "trained heads beat the best trivial baseline",
        "recall heads - best baseline",
        lambda rows: rows["heads"]["trained_recall"] - rows["heads"]["best_baseline"],
        above=0.0,
    ),
    _answers("distilled heads alone collapse", "int4_k4", "heads", above=0.1),
    Claim(
        "... into repetitive text",
        "repeated 4-grams heads - int4_k4",
        gain("repetition", "heads", "int4_k4"),
        above=0.05,
    ),
    _closer("SFT on the student path recovers", "heads", "paper_sft"),
    _closer("heads first: SFT over untrained frozen heads is worse", "untrained_sft", "paper_sft"),
    _closer("heads first: SFT that trains untrained heads along is worse", "untrained_joint", "paper_sft"),
    _closer("the LoRA must see predicted routing: native LoRA plus heads is worse", "native_lora", "paper_sft"),
    _closer("reversed order (LoRA, then heads distilled on it) is worse", "heads_last", "paper_sft"),
    _closer("on-policy needs SFT first", "no_sft_policy", "paper"),
    _closer("on-policy improves on SFT (KL)", "paper_sft", "paper"),
    _answers("... and on its answers", "paper", "paper_sft"),
    _closer("on-policy improves on as much more SFT (KL)", "more_sft", "paper"),
    _answers("... and on its answers", "paper", "more_sft"),
    Claim(
        "the student ends near the teacher (paper: 4.0 and 2.8 points on average)",
        "exact match teacher - paper",
        gain("exact_match", "teacher", "paper"),
        below=0.05,
        noise=MATCH_NOISE,
    ),
    # the divergence
    _closer("reverse KL is better than forward KL (by forward KL)", "forward_kl", "paper"),
    Claim(
        "... by reverse KL",
        "RKL forward_kl / paper",
        ratio("reverse_kl", "forward_kl", "paper"),
        above=1.0,
        noise=KL_NOISE,
    ),
    _answers("... by answers", "paper", "forward_kl"),
    _closer("the tail bucket matters: top 32", "reverse_kl_no_tail", "paper"),
    _closer("the tail bucket matters: top 2", "top2_no_tail", "top2"),
    _closer("dense top-k is better than the sampled token", "sampled_token", "paper"),
    # merging
    Claim("merging erases the LoRA: attention (paper 34 %)", "survival", of("paper", "survival attention"), below=0.5),
    Claim("merging erases the LoRA: linear attention", "survival", of("paper", "survival linear attention"), below=0.5),
    Claim(
        "merging erases the LoRA: dense weights (paper 2 %)",
        "survival",
        of("paper", "survival shared expert"),
        below=0.5,
    ),
    Claim("merging erases the LoRA: logits (paper 18 %)", "survival", of("paper", "survival logits"), below=0.5),
    _closer("a merged model is worse", "paper_merged", "paper"),
    _answers("... in its answers", "paper", "paper_merged"),
    # K
    _closer("a smaller K needs retraining: K=2", "k2_reused", "k2_trained"),
    _closer("another K needs retraining: K=8", "k8_reused", "k8_trained"),
    _closer("after retraining K=2 is still worse than K=4", "k2_trained", "paper_sft"),
    # routing
    Claim(
        "adjacent tokens share about 1/4 of a layer's experts: more than chance",
        "overlap - overlap of independent draws, int4 at K=4",
        lambda rows: rows["int4_k4"]["overlap k4"] - rows["int4_k4"]["overlap k4 by frequency"],
        above=0.05,
    ),
    Claim(
        "heads lose recall on their own decode-time features (feature drift)",
        "recall native - own, heads",
        lambda rows: rows["heads"]["recall_native"] - rows["heads"]["recall_own"],
        above=0.0,
    ),
    # ours
    Claim(
        "refinement raises recall on the heads' own features (the paper's open question)",
        "recall_own refined - heads",
        gain("recall_own", "refined", "heads"),
        above=0.0,
        ours=True,
    ),
    _closer("refinement and joint heads are better after SFT", "paper_sft", "ours_sft", ours=True),
    _closer("refinement and joint heads are better in the end", "paper", "ours", ours=True),
    _answers("... in answers", "ours", "paper", ours=True),
    Claim(
        "a LoRA trained for it makes routing predictable",
        "recall_own predictable_weak - ours_sft",
        gain("recall_own", "predictable_weak", "ours_sft"),
        above=0.0,
        ours=True,
    ),
    _closer("... and that is better after SFT", "ours_sft", "predictable_weak", ours=True),
    _answers("... in answers", "predictable_weak", "ours_sft", ours=True),
    _closer("heads are better by KL than by BCE", "heads_bce", "heads", ours=True),
    Claim(
        "... though BCE finds more of the true experts",
        "recall heads_bce - heads",
        gain("recall", "heads_bce", "heads"),
        above=0.0,
        ours=True,
    ),
    _closer("... and after joint SFT too", "bce_sft", "kl_sft", ours=True),
    _closer("heads are better by KL + margin than by KL", "heads", "heads_kl_margin", ours=True),
    # beyond a model of 3 MB in memory
    Claim("prerouting speeds decoding up by 80 to 84 % (K=2, 4, 8; 16 GB)", "needs experts on a real SSD"),
    Claim("20.4 tok/s in 2.9 GiB on a Mac mini M4 Pro", "needs the hardware and the 35B model"),
    Claim("reasoning loses most (AIME -6.1, -10.0), knowledge least", "needs long chains of reasoning"),
)
