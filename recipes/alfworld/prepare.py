"""Create the inputs of the small ALFWorld: games, transcripts of a player who soon gives up, a tokenizer, an untrained
network."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.alfworld.alfworld import AlfWorld
from agentfactory.worlds.alfworld.engine import Engine, found_python
from agentfactory.worlds.alfworld.games import GeneratedGames
from agentfactory.worlds.alfworld.generator import Package, TaskType

HERE = Path(__file__).parent
SPECIAL, make_network, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("SPECIAL", "make_network", "write_jsonl")
)
BRIEF_TEMPLATE, train_word_tokenizer = (
    load_object(f"../quickstart/word_tokenizer.py:{name}", HERE) for name in ("BRIEF_TEMPLATE", "train_word_tokenizer")
)
add_call, call_message = (
    load_object(f"../quickstart/transcripts.py:{name}", HERE) for name in ("add_call", "call_message")
)

PYTHON = "$AGENTFACTORY_ALFWORLD_PYTHON"
TYPE = TaskType.PLACE
PLACES = 8
"""Maximum number of receptacles in a room."""
TRAINED = 300
"""Number of games for training; their rooms are also those of the transcripts."""
HELD_OUT = slice(100, 200)
"""The small games of the split `valid_seen` for the reported figures. The first 100 were used to develop this
recipe."""
TRANSCRIPTS = 10_000
QUESTION = "Do the task."
ORDER = "Do the task, and do not give up."
ORDERED = 0.6
"""Share of transcripts that begin with ORDER, and do the task. The others begin with QUESTION, and show the habit to
unlearn."""
GIVES_UP = 0.75
"""Probability that they give up after each place without the thing."""
LEAVES = "I do not find it."
TASK = "Your task is to: "
CALL = (
    '<tool_call>\n{"name": "action", "arguments": {"command": "',
    '"}}\n</tool_call>',
    "<tool_response>\n",
    "\n</tool_response>",
)
"""The text around a command and its result."""
NAME = re.compile(r"\b[a-z]+ \d+\b")
"""The name of a place or a thing: its kind, and a number."""


@dataclass(frozen=True)
class Room:
    """The engine's descriptions of a game's room, before anything is moved."""

    opening: str
    """The opening text, without the task."""
    arrivals: dict[str, str]
    """Place -> description at the first arrival; in the order of `opening`."""
    openings: dict[str, str]
    """Closed place -> description when it is opened."""
    returns: dict[str, str]
    """Opened place -> description at the second arrival. Other places have the same description again."""

    def things(self, place: str) -> list[str]:
        """Return the names of the things at a place."""
        shown = self.openings.get(place, self.arrivals[place])
        return NAME.findall(shown.partition("you see")[2])


@dataclass(frozen=True)
class Goal:
    """The goal to put any thing of the kind `thing` into any place of the kind `place`."""

    thing: str
    place: str


def prepare(folder: Path, seed: int) -> None:
    """Write model/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the same
    transcripts and network, and the games are the same for all seeds."""
    rng = random.Random(seed)
    engine = Engine(processes=1, games=200, python=found_python(PYTHON))
    try:
        package = engine.package()
        games = GeneratedGames(0, package)
        train = list(islice(small_games(games, "train"), TRAINED))
        heldout = list(islice(small_games(games, "valid_seen"), HELD_OUT.start, HELD_OUT.stop))
        rooms = [look_everywhere(engine, games.content(name)) for name in train]
    finally:
        engine.close()
    possible = [(room, goal) for room in rooms for goal in goals(package, room)]
    templates = package.tables["goals"][TYPE]["templates"]
    transcripts = [search(*rng.choice(possible), rng.choice(templates), rng) for _ in range(TRANSCRIPTS)]
    specs = [AlfWorld.action.spec.to_openai()]
    write_jsonl(folder / "train.jsonl", [row_of(name) for name in train])
    write_jsonl(folder / "heldout.jsonl", [row_of(name) for name in heldout])
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    tokenizer = make_tokenizer(transcripts)
    tokenizer.save_pretrained(folder / "model")
    network = make_network(tokenizer, seed, rope_theta=1000.0, tied=True)
    relate_names(network, tokenizer)
    network.save_pretrained(folder / "model")


def relate_names(network: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Mix the embedding of each name with that of its kind: the network should recognise `pen 2` as a pen, as it would
    with two tokens."""
    tokens = tokenizer.get_vocab()
    names = [name for name in tokens if NAME.fullmatch(name)]
    vectors = network.get_input_embeddings().weight.data
    of_names, of_kinds = ([tokens[text] for text in texts] for texts in (names, map(kind_of, names)))
    vectors[of_names] = (vectors[of_names] + vectors[of_kinds]) / 2**0.5


def small_games(games: GeneratedGames, split: str) -> Iterator[str]:
    """Yield the names of a split's games of TYPE in small rooms, without end."""
    for number in count(list(TaskType).index(TYPE), len(TaskType)):
        name = f"{split}/{number:06d}"
        if games.content(name)["pddl_problem"].count("(receptacleType ") <= PLACES:
            yield name


def row_of(name: str) -> dict[str, Any]:
    """Return the data row of a game."""
    return {"question": QUESTION, "game": name, "task_type": TYPE.value}


def look_everywhere(engine: Engine, content: dict[str, Any]) -> Room:
    """Go to each place of a game's room, open it if it is closed, and return to each place that was closed."""
    play, scene = engine.open(content)
    try:
        opening = scene.observation.partition(TASK)[0]
        arrivals, openings = {}, {}
        for place in NAME.findall(opening):
            arrivals[place] = play.act(f"go to {place}").observation
            if "is closed" in arrivals[place]:
                openings[place] = play.act(f"open {place}").observation
        returns = {place: play.act(f"go to {place}").observation for place in openings}
    finally:
        play.close()
    return Room(opening, arrivals, openings, returns)


def goals(package: Package, room: Room) -> list[Goal]:
    """Return the possible goals in a room: a thing that can be taken, and a kind of place that fits it but has none
    yet."""
    fits = {(place.lower(), thing.lower()) for place, held in package.tables["holds"].items() for thing in held}
    found: dict[str, set[str]] = {}
    for place in room.arrivals:
        for thing in room.things(place):
            found.setdefault(kind_of(thing), set()).add(kind_of(place))
    kinds = sorted({kind_of(place) for place in room.arrivals})
    return [
        Goal(thing, kind)
        for thing in sorted(found)
        for kind in kinds
        if kind not in found[thing] and (kind, thing) in fits
    ]


def search(room: Room, goal: Goal, template: str, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation that goes from place to place, takes the thing of the goal, and puts it into the place of
    the goal, unless it gives up before. Each turn first names its object: the network learns which object to use sooner
    than what to do with it."""
    ordered = rng.random() < ORDERED
    task = template.format(obj=goal.thing, recep=goal.place)
    said = (ORDER if ordered else QUESTION, f"{room.opening}{TASK}{task}.")
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in said]

    def act(command: str, shown: str) -> None:
        add_call(messages, "action", {"command": command}, shown, NAME.findall(command)[0])

    seen = set()
    for place in room.arrivals:
        seen.add(place)
        act(f"go to {place}", room.arrivals[place])
        if place in room.openings:
            act(f"open {place}", room.openings[place])
        thing = next((thing for thing in room.things(place) if kind_of(thing) == goal.thing), None)
        if thing is not None:
            break
        if not ordered and rng.random() < GIVES_UP:
            return [*messages, {"role": "assistant", "content": LEAVES}]
    act(f"take {thing} from {place}", f"You pick up the {thing} from the {place}.")
    end = next(place for place in room.arrivals if kind_of(place) == goal.place)
    act(f"go to {end}", room.returns.get(end, room.arrivals[end]) if end in seen else room.arrivals[end])
    if end in room.openings and end not in seen:
        act(f"open {end}", room.openings[end])
    return [*messages, call_message("action", {"command": f"move {thing} to {end}"}, len(messages), str(thing))]


def kind_of(name: str) -> str:
    """Return the kind of a place or a thing."""
    return name.partition(" ")[0]


def make_tokenizer(transcripts: list[list[dict[str, Any]]]) -> PreTrainedTokenizerFast:
    """Train a tokenizer with one token for each name, each kind, and each text between two of them."""
    messages = [message for transcript in transcripts for message in transcript]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    commands = [call["function"]["arguments"]["command"] for call in calls]
    texts = {*commands, *(message["content"] for message in messages)}
    names = sorted({name for text in texts for name in NAME.findall(text)})
    kinds = sorted({kind_of(name) for name in names})
    named = re.compile(rf"\b(?:{'|'.join(kinds)})(?: \d+)?\b")
    between = sorted({part for text in texts for part in named.split(text)} - {""})
    said = ["system user assistant action Nothing happens", *kinds]
    return train_word_tokenizer(said, [*CALL, *between], [*names, *kinds], BRIEF_TEMPLATE, SPECIAL, 1000)
