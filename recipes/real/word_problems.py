"""Word problems of our own for SFT: a question, a thought in words, and the expression that solves it."""

import random
from collections.abc import Iterator

NAMES = ("Anna", "Ben", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivan", "Jala", "Kofi", "Lena")

PROBLEMS = (
    (
        "{name} buys {a} notebooks for ${b} each and pays with ${h}. How much change does {name} get?",
        "The notebooks cost {a} times {b}. The change is {h} minus that.",
        "{h} - {a} * {b}",
    ),
    (
        "A bus has {h} seats. At the first stop {s} people get on, at the second {t} more, and {a} get off. How "
        "many seats are free now?",
        "On the bus are {s} plus {t} minus {a} people. The free seats are {h} minus that.",
        "{h} - ({s} + {t} - {a})",
    ),
    (
        "{name} reads {s} pages a day on weekdays and {t} pages a day at weekends. How many pages is that in {a} "
        "weeks?",
        "A week has 5 weekdays with {s} pages and 2 days with {t} pages. That is done {a} times.",
        "{a} * (5 * {s} + 2 * {t})",
    ),
    (
        "A farmer picks {h} apples and sells {p}% of them. The rest goes equally into {a} boxes. How many apples "
        "are in a box?",
        "{p}% are sold, so {h} * (100 - {p}) / 100 apples are left. They are shared by {a} boxes.",
        "{h} * (100 - {p}) / 100 / {a}",
    ),
    (
        "{name} is {a} years old. The grandmother is {b} times as old. How old will the grandmother be in {s} years?",
        "The grandmother is {a} times {b} now. In {s} years she is {s} older.",
        "{a} * {b} + {s}",
    ),
    (
        "A machine fills {s} bottles in a minute. After {a} minutes a second machine, which fills {t} bottles in a "
        "minute, starts to help. How many bottles are full after {b} more minutes?",
        "The first machine runs {a} plus {b} minutes, and the second runs {b} minutes.",
        "{s} * ({a} + {b}) + {t} * {b}",
    ),
    (
        "{name} has {s} stamps, which is {a} fewer than {b} times the stamps of a friend. How many stamps does the "
        "friend have?",
        "{b} times the friend's stamps is {s} plus {a}. So the friend has that divided by {b}.",
        "({s} + {a}) / {b}",
    ),
    (
        "Tickets cost ${a} for children and ${b} for adults. How much do {s} children and {t} adults pay after a "
        "discount of {p}%?",
        "Without the discount they pay {s} times {a} plus {t} times {b}. They pay 100 - {p} percent of it.",
        "({s} * {a} + {t} * {b}) * (100 - {p}) / 100",
    ),
    (
        "A pool holds {h} liters. One pipe fills {a} liters an hour and a leak loses {c} liters an hour. How many "
        "hours does it take to fill the empty pool?",
        "Each hour adds {a} minus {c} liters. The hours are {h} divided by that.",
        "{h} / ({a} - {c})",
    ),
    (
        "{name} earns ${s} an hour for the first 8 hours of a day and {a} times that for each further hour. How "
        "much does {name} earn on a day of {b} hours?",
        "The first 8 hours give 8 times {s}. The other hours are {b} minus 8, and each gives {a} times {s}.",
        "8 * {s} + ({b} - 8) * {a} * {s}",
    ),
    (
        "There are {h} pupils in a school. 1/{c} of them play football, and {s} more than that play chess. How "
        "many play chess?",
        "Football is played by {h} divided by {c}. Chess has {s} more.",
        "{h} / {c} + {s}",
    ),
    (
        "A rope of {h} meters is cut into {a} pieces of {b} meters, and the rest into pieces of {c} meters. How "
        "many short pieces are there?",
        "The long pieces use {a} times {b} meters. The rest is divided by {c}.",
        "({h} - {a} * {b}) / {c}",
    ),
    (
        "{name} saves ${s} a week and spends ${a} of it each week. How many weeks does it take to buy a bicycle "
        "for ${h}?",
        "Each week {s} minus {a} dollars are left. The weeks are {h} divided by that.",
        "{h} / ({s} - {a})",
    ),
    (
        "{name} has {s} red marbles, {a} times as many blue marbles, and {t} fewer green marbles than blue ones. "
        "How many marbles is that in all?",
        "There are {a} times {s} blue marbles, and {t} fewer green ones. All three are added.",
        "{s} + {a} * {s} + ({a} * {s} - {t})",
    ),
    (
        "A coat costs ${h}. Its price rises by {p}%, and then ${s} are taken off. What does it cost in the end?",
        "After the rise it costs {h} * (100 + {p}) / 100. Then {s} are subtracted.",
        "{h} * (100 + {p}) / 100 - {s}",
    ),
    (
        "A train drives {s} kilometers an hour for {a} hours, and then {t} kilometers an hour for {b} hours. How "
        "far is it still to go, if the whole way is {h}0 kilometers?",
        "It has driven {s} times {a} plus {t} times {b} kilometers. The rest is {h}0 minus that.",
        "{h}0 - ({s} * {a} + {t} * {b})",
    ),
    (
        "{name} bakes {a} trays of {s} cookies. The family eats {t} of them, and the others go into bags of {b}. "
        "How many bags are full?",
        "There are {a} times {s} cookies, minus {t} that are eaten. They are divided by {b}.",
        "({a} * {s} - {t}) / {b}",
    ),
    (
        "{a} friends share a bill of ${h} equally, and each adds a tip of ${c}. How much does each of them pay?",
        "The bill divided by {a} is each one's share. The tip of {c} is added.",
        "{h} / {a} + {c}",
    ),
    (
        "A baker uses {a} eggs for a cake and {c} eggs for a pie. How many dozens of eggs are needed for {s} cakes "
        "and {t} pies?",
        "The cakes need {s} times {a} eggs, and the pies {t} times {c}. A dozen is 12.",
        "({s} * {a} + {t} * {c}) / 12",
    ),
    (
        "{name} watches {a} episodes of {s} minutes on each of {b} days. How many hours is that?",
        "That is {a} times {s} times {b} minutes. An hour has 60 minutes.",
        "{a} * {s} * {b} / 60",
    ),
)
"""Question, thought, expression. a and b are small numbers, c is smaller than both, s and t are middling, h is large
and p is a percentage."""


def word_problems(count: int, seed: int) -> Iterator[tuple[str, str, str, int]]:
    """Yield `count` questions with thought, expression and answer, which is a positive whole number; each of the
    problems in turn, with other numbers."""
    rng = random.Random(seed)
    for number in range(count):
        question, thought, expression = PROBLEMS[number % len(PROBLEMS)]
        while True:
            c = rng.randint(2, 6)
            values = {"a": rng.randint(c + 1, 12), "b": rng.randint(c + 1, 15), "c": c}
            values |= {"s": rng.randint(10, 60), "t": rng.randint(10, 60), "h": rng.randint(10, 60) * 10}
            values |= {"p": rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 75)), "name": rng.choice(NAMES)}
            answer = eval(expression.format(**values))
            if answer > 0 and answer == int(answer):
                break
        yield question.format(**values), thought.format(**values), expression.format(**values), int(answer)
