"""Writes the stories for the first run (data.sources: [toy-stories]).

`python scripts/stories.py` always writes the same stories. A story keeps the same two
friends, thing and place from beginning to end.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

COUNT, SEED = 4500, 7
OUT = Path(__file__).parents[1] / "python/trainfleet/data/toy-stories.jsonl.gz"
WORDS = {
    "name": "Mia Tom Lena Otto Ida Finn Nora Max Ella Hugo Rosa Emil Clara Paul Lucy Theo Anna",
    "kind": "fox bear mouse owl rabbit hedgehog duck cat frog crow otter squirrel robot dragon",
    "trait": "little old brave sleepy curious shy clever hungry grumpy cheerful",
    "thing": "kite drum boat lamp cake map hat bell ladder wagon book clock umbrella whistle",
    "look": "red blue yellow green golden silver tiny huge shiny crooked",
    "mood": "sad angry worried tired cross",
}
PHRASES = {
    "place": (
        "in a hollow tree",
        "by the river",
        "on a windy hill",
        "in a small blue house",
        "under the old bridge",
        "at the edge of the forest",
        "behind the bakery",
        "in a lighthouse by the sea",
        "next to the train station",
        "in a garden full of weeds",
    ),
    "once": (
        "One morning",
        "One rainy day",
        "One night",
        "On the first day of spring",
        "One cold evening",
        "After a long storm",
    ),
    "lost": (
        "the wind took it and carried it over the roofs",
        "it rolled down the hill and fell into the river",
        "a crow picked it up and flew away",
        "it broke into two pieces",
        "it got stuck at the top of the tallest tree",
        "it was gone, and nobody had seen it",
    ),
    "help": (
        "tied two ropes together",
        "built a bridge out of spoons",
        "asked the moon for some light",
        "counted to ten very slowly",
        "climbed on the shoulders of a snail",
        "drew a map in the sand",
        "sang a song until the clouds went away",
        "knocked on every door of the town",
        "baked a pie for the whole forest",
        "borrowed the longest ladder of the village",
    ),
}
PLOT = (
    (
        "There once was {a_trait} {kind} named {one} who lived {place}.",
        "{one} was {a_trait} {kind}. {one} lived {place}.",
    ),
    (
        "More than anything, {one} loved {a_look} {thing}.",
        "Every day {one} played with {a_look} {thing}.",
        "{one} had only one thing, {a_look} {thing}.",
    ),
    ("{once}, {one} took the {thing} outside, but {lost}.",),
    (
        "{one} sat down and was very {mood}.",
        '"Oh no, my {thing}!" cried {one}.',
        '"What will I do without my {thing}?" asked {one}.',
    ),
    (
        "Then {two} the {other} came by.",
        "Just then {two}, {a_other}, looked around the corner.",
        "But {two} the {other} had heard it and came to help.",
    ),
    (
        '"Do not worry," said {two}. "I know what to do."',
        '"I have an idea," said {two}.',
        '"Friends never give up," said {two}.',
    ),
    ("So {two} {help}, and {one} {more}.",),
    (
        "It took all day, but it worked.",
        "At first it did not work at all, and then it did.",
        "It was not easy, and they laughed a lot.",
        "By the time the stars came out, they were done.",
        "Even the grumpy snail had to clap.",
    ),
    (
        "Soon {one} had the {thing} back.",
        "There was the {thing}, as good as new.",
        '"My {thing}!" said {one}. "Thank you, {two}!"',
    ),
    (
        "From that day on they were friends.",
        "That night they ate soup and slept very well.",
        "And they never lost it again.",
        "And if it has not rained, they are still dancing there.",
        "They still tell this story when it snows.",
        "The next morning they did it all again, just for fun.",
    ),
)


def story(dice: random.Random) -> str:
    known = {key: dice.choice(words.split()) for key, words in WORDS.items()}
    known |= {key: dice.choice(phrases) for key, phrases in PHRASES.items()}
    known["one"], known["two"] = dice.sample(WORDS["name"].split(), 2)
    known["kind"], known["other"] = dice.sample(WORDS["kind"].split(), 2)
    known["help"], known["more"] = dice.sample(PHRASES["help"], 2)
    known |= {f"a_{key}": f"{article(word)} {word}" for key, word in known.items()}
    return " ".join(dice.choice(ways).format(**known) for ways in PLOT)


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def main() -> None:
    dice = random.Random(SEED)
    lines = [json.dumps({"text": story(dice)}) for _ in range(COUNT)]
    OUT.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
