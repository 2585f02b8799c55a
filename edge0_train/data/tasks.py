"""Generated chat tasks with a checkable answer, for the nano tier.

Every task makes a `Problem`: the user's text, a scratchpad that works the answer out step by step, and
`#answer`. A wrong digit anywhere in the scratchpad normally ruins the answer, so exact match measures the
whole chain. With the nano tokenizer and chat template one row is at most 64 tokens; `chain`, which is not
among the default tasks, takes up to 256.

Train and eval never share a prompt: the split is a hash of the prompt, whatever the seed. This matters for
`multiply`, whose whole space (7,920 prompts) is seen many times during training.

Add a task: write `def name(rng: Random) -> Problem` and enter it in `TASKS` (`SHORT_TASKS` is what the embedded
teacher's tokenizer and the default prompts are made from).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

SPLITS = ("train", "eval")
EVAL_ONE_IN = 10

NAMES = ("Ann", "Ben", "Eve", "Ida", "Jon", "Kim", "Lea", "Max", "Ray", "Sam", "Tom", "Zoe")
LABELS = "abcdefghijklmnopqrstuvwxyzABCD"
THINGS = ("caps", "cups", "eggs", "figs", "hats", "jars", "keys", "mugs", "nuts", "pens", "toys", "yams")


@dataclass(frozen=True)
class Problem:
    """One chat problem; `completion` is the scratchpad, then ` #` and `answer`."""

    task: str
    prompt: str
    completion: str
    answer: str


def _problem(task: str, prompt: str, steps: Sequence[str], answer: str) -> Problem:
    return Problem(task, prompt, f"{' '.join(steps)} #{answer}", answer)


def _columns(number: int, count: int) -> list[int]:
    """The decimal digits of `number`, lowest first, filled with zeros up to `count`."""
    return [number // 10**i % 10 for i in range(count)]


def add(rng: Random) -> Problem:
    """Sum of two numbers of 2-3 digits, column by column: digit + digit + carry = two digits."""
    a, b = (rng.randrange(10, 100) if rng.random() < 0.5 else rng.randrange(100, 1000) for _ in range(2))
    count = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(_columns(a, count), _columns(b, count), strict=True):
        column = x + y + carry
        steps.append(f"{x}+{y}+{carry}={column:02d}")
        carry = column // 10
    return _problem("add", f"Add {a} and {b}.", steps, str(a + b))


def reverse(rng: Random) -> Problem:
    """Reversal of 4-8 digits: split into pairs, then write the pairs backwards."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(4, 8)))
    pairs = [digits[i : i + 2] for i in range(0, len(digits), 2)]
    steps = [" ".join(pairs) + ":", *(pair[::-1] for pair in reversed(pairs))]
    return _problem("reverse", f"Reverse {digits}.", steps, digits[::-1])


def multiply(rng: Random) -> Problem:
    """Product of a number of 2-3 digits and one digit (2-9), as partial products with the carry."""
    a = rng.randrange(10, 100) if rng.random() < 0.25 else rng.randrange(100, 1000)
    b = rng.randint(2, 9)
    steps, carry = [], 0
    for x in _columns(a, len(str(a))):
        column = x * b + carry
        steps.append(f"{x}*{b}+{carry}={column:02d}")
        carry = column // 10
    return _problem("multiply", f"Multiply {a} by {b}.", steps, str(a * b))


def _gets(have: int, more: int) -> list[str]:
    """`have + more` for one more digit: the ones (two digits), then the tens with the carry."""
    tens, ones = divmod(have, 10)
    carry = (ones + more) // 10
    return [f"{ones}+{more}={ones + more:02d}", f"{tens}+{carry}={tens + carry}"]


def _gives(have: int, less: int) -> list[str]:
    """`have - less` for one digit: the ones, with a borrowed 1 in front where needed, then the tens."""
    tens, ones = divmod(have, 10)
    borrow = int(ones < less)
    return [f"{borrow}{ones}-{less}={10 * borrow + ones - less}", f"{tens}-{borrow}={tens - borrow}"]


def word(rng: Random) -> Problem:
    """Word problem of one step (gets, gives) or two (bags, then gets or gives; gets, then gives).

    All changes are of one digit and worked out digit by digit. With two-digit changes in one step
    (`43+62=105`) the nano teacher was right in 56 % of the problems only.
    """
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        bags, each = rng.randint(2, 9), rng.randint(2, 9)
        have = bags * each
        story = f"{name} has {bags} bags of {each} {thing}"
        steps = [f"{bags}*{each}={have:02d}"]
        gets, gives = rng.choice(((True, False), (False, True)))
    else:
        have = rng.randint(10, 90)
        story = f"{name} has {have} {thing}"
        steps = []
        gets, gives = rng.choice(((True, False), (False, True), (True, True)))
    if gets:
        more = rng.randint(2, 9)
        story += f", gets {more}"
        steps += _gets(have, more)
        have += more
    if gives:
        less = rng.randint(2, min(have, 9))
        story += f", gives {less}"
        steps += _gives(have, less)
        have -= less
    return _problem("word", f"{story}. How many?", steps, str(have))


def chain(rng: Random) -> Problem:
    """Running sum modulo 100 of 30 digits, each with a letter; every result is written out, 5 tokens a step.

    A step needs the result before it and the digit that the prompt gives for its letter, so one wrong result makes all later
    ones wrong: errors compound as they do in long reasoning. The letters tell the steps apart; without them a nano model
    would have to count to find the next digit. The digit follows its letter at once: with a sign in between (`a+8`) the nano
    teacher learnt to look up the sign, but not the digit. Nothing stands between the steps: with the nano tokenizer a blank
    and a letter are one token for some letters and two for others.
    """
    changes = [(letter, rng.randint(1, 9)) for letter in LABELS]
    have, steps = 0, []
    for letter, change in changes:
        have = (have + change) % 100
        steps.append(f"{letter}{change}={have:02d}")
    prompt = "".join(f"{letter}{change}" for letter, change in changes)
    return _problem("chain", f"Run:{prompt}.", ["".join(steps)], f"{have:02d}")


SHORT_TASKS = ("add", "reverse", "multiply", "word")
TASKS: dict[str, Callable[[Random], Problem]] = {
    "add": add,
    "reverse": reverse,
    "multiply": multiply,
    "word": word,
    "chain": chain,
}


def split_of(prompt: str) -> str:
    """The split a prompt belongs to: `eval` for one in `EVAL_ONE_IN` prompts, by SHA-256."""
    return "eval" if int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % EVAL_ONE_IN == 0 else "train"


def problems(split: str, seed: int, count: int, tasks: Sequence[str] | None = None) -> list[Problem]:
    """`count` problems of one split; the same arguments give the same list.

    `tasks`: names from `TASKS`, drawn uniformly; None means `SHORT_TASKS`. Prompts can repeat within a list.

    Raises ValueError for an unknown split or task, an empty list of tasks, or a negative count.
    """
    names = SHORT_TASKS if tasks is None else tuple(tasks)
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; use one of {', '.join(SPLITS)}.")
    if not names:
        raise ValueError(f"tasks is empty; name at least one of {', '.join(TASKS)}.")
    for name in names:
        if name not in TASKS:
            raise ValueError(f"tasks contains {name!r}; use names from {', '.join(TASKS)}.")
    if count < 0:
        raise ValueError(f"count is {count}; use 0 or more.")
    rng = Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = TASKS[rng.choice(names)](rng)
        if split_of(problem.prompt) == split:
            found.append(problem)
    return found


def messages(problem: Problem) -> list[dict[str, str]]:
    """The chat up to the assistant's turn."""
    return [{"role": "user", "content": problem.prompt}]


def extract_answer(text: str) -> str | None:
    """What follows the last `#` up to the end of the turn, stripped; None without a `#` or an answer."""
    _, mark, tail = text.rpartition("#")
    answer = tail.split("<|im_end|>")[0].strip()
    return answer if mark and answer else None


def is_correct(problem_answer: str, text: str) -> bool:
    """Whether the generated `text` ends in exactly this answer."""
    return extract_answer(text) == problem_answer
