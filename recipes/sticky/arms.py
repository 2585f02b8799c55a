"""What is trained: a served K and a stickiness, refined, by SFT and on-policy on the path that it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One row of the curve: K, `tier.router.sticky` (bias 0: none), and what bends it (bends.py; "": nothing)."""

    k: int
    bias: float = 0.0
    window: int = 0
    bend: str = ""

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`4`, `4:2,2` or `4:2,2+grow`: K, behind a colon bias and window, behind a plus a bend."""
        text, _, bend = text.partition("+")
        k, _, rule = text.partition(":")
        bias, _, window = rule.partition(",")
        return cls(int(k), float(bias or 0), int(window or 0), bend)

    @property
    def name(self) -> str:
        """The arm's directory below that of its seed."""
        return f"k{self.k}" + f"-b{self.bias:g}w{self.window}" * bool(self.window) + f"+{self.bend}" * bool(self.bend)

    def overrides(self) -> list[str]:
        """What the arm changes in its tier, as on the command line."""
        return [
            f"tier.k={self.k}", f"tier.router.sticky.bias={self.bias:g}", f"tier.router.sticky.window={self.window}"
        ]  # fmt: skip

    @property
    def sft(self) -> list[str]:
        """What SFT has otherwise, as on the command line."""
        return [TRAINED[part] for part in self._parts if part in TRAINED] + [
            f"heads.change_penalty=0.{part.removeprefix(PENALTY)}" for part in self._parts if part.startswith(PENALTY)
        ]

    @property
    def plain(self) -> Arm:
        """The same K without stickiness and penalty, trained as long."""
        return Arm(self.k, bend="-".join(part for part in self._parts if part in TRAINED))

    @property
    def _parts(self) -> list[str]:
        return self.bend.split("-")


TRAINED = {"long": "optim.steps=720", "joint": "heads.joint_lr=1.0"}
"""{bend: what SFT has otherwise}; `+long-joint` is both."""
PENALTY = "penalty."
"""`+penalty.005`: SFT with heads.change_penalty=0.005."""
CURVE = ("4", "4:1,2", "4:1.5,2", "4:2,2", "4:2,4", "4:3,4", "8", "8:2,2", "8:3,4", "2", "2:2,2", "2:3,4")
BENT = (
    "4+long",
    "4:2,2+long",
    "4+joint",
    "4:2,2+joint",
    "4+long-joint",
    "4:2,2+long-joint",
    "4:2,2+grow",
    "4:2,2+rise",
    "4:2,2+fall",
    "4+penalty.01",
    "4:2,2+penalty.005",
    "4:2,2+penalty.02",
    "8:2,2+penalty.005",
    "4:2,2+tail.2",
    "4+tail.2",
)
