"""Where a prompt is cut into passes.

Rounding may depend on how many tokens a pass has. So a cut depends on nothing that follows it: two prompts are cut alike as far
as they are alike, and what a sequence is at a cut is what any prompt that begins so makes of it, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from collections.abc import Sequence as Ids
from dataclasses import dataclass

SHORTEST = 16  # tokens of a turn whose end is a cut; a shorter one goes with the next


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, and its cuts, in order; the last token goes alone and behind the last cut.

    Attributes:
        ids: at least one. cuts: where passes end, in tokens from the beginning. turns: those of them at the end of a turn.
    """

    ids: tuple[int, ...]
    cuts: tuple[int, ...]
    turns: tuple[int, ...]

    def passes(self, start: int = 0) -> list[tuple[int, ...]]:
        """Ids of all passes but the last token's, from the cut `start` on."""
        cuts = [start, *(cut for cut in self.cuts if cut > start)]
        return [self.ids[begin:end] for begin, end in itertools.pairwise(cuts)]

    def worthwhile(self) -> list[int]:
        """Cuts at which other prompts will probably part from this one, those first that will be wanted first.

        The last turn's end: the answer is asked for again, or the conversation goes on. The one before: the last turn is edited.
        The first one: another conversation with the same system prompt. Where no turn ends, or a text follows the last one: the
        prompt's own end, and the last full chunk of a text that may grow.
        """
        wanted = list(self.turns[:-3:-1]) + list(self.turns[:1])
        if self.cuts and self.cuts[-1] - (self.turns or (0,))[-1] >= SHORTEST:
            wanted = [*self.cuts[:-3:-1], *wanted]
        return list(dict.fromkeys(wanted))


def cut(ids: Ids[int], chunk: int, turn_ends: Collection[int]) -> Prompt:
    """Cut a prompt behind the tokens `turn_ends`, unless the turn is short, and else into chunks of `chunk` tokens."""
    last = len(ids) - 1
    ends = [place + 1 for place in range(last) if ids[place] in turn_ends]
    cuts: list[int] = []
    turns: list[int] = []
    reached = 0
    for end in ends:
        reached = _chunks(cuts, reached, end, chunk)
        if end - (turns[-1] if turns else 0) >= SHORTEST:
            cuts.append(end)
            turns.append(end)
            reached = end
    if _chunks(cuts, reached, last, chunk) < last:
        cuts.append(last)
    return Prompt(tuple(ids), tuple(cuts), tuple(turns))


def _chunks(cuts: list[int], reached: int, end: int, chunk: int) -> int:
    """Add the ends of full chunks between the last cut, `reached`, and `end`; returns the new last one."""
    full = range(reached + chunk, end, chunk)
    cuts += full
    return full[-1] if full else reached
