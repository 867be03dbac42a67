"""Records of numbered lines in the form of LongEval, generated from a seed or read from a LongEval file.

    line brisk-harbor: REGISTER_CONTENT is <24169>

The names of the lines are unique pairs of an adjective and a noun, the numbers uniform in 1..50000, and the line that
is asked for is uniform among all.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

LARGEST_NUMBER = 50_000
ADJECTIVE_TEXT = """
able agile amber ample ancient arid autumn bold brave breezy brief bright brisk broad bronze calm candid careful
cheerful civil clean clear clever coastal cold copper coral cosmic cosy crimson crisp curious daring deep deft dense
distant dry dusty eager early earnest easy elder electric empty even exact faint fair famous fancy fast fertile
final fine firm flat fluent fond formal frank free fresh frosty full gentle giant glad golden grand grave green
happy hardy hasty heavy hidden high hollow honest humble icy ideal idle inner ivory jolly keen kind large late lazy
lean level light lively local lone loud loyal lucky lunar major mellow mild minor misty modern modest narrow neat
noble northern odd olive open orange outer pale patient plain polite proud purple quick quiet rapid rare ready
remote rich robust rosy rough round royal rural rustic sandy scarlet serene sharp shiny shy silent silver simple
sleek slim slow smooth snowy sober soft solar solid sour southern spare stable steep stern still stout strict sturdy
sunny swift tall tame tidy tiny tough tranquil upper urban vast velvet vivid warm wary western wide wild windy wise
witty wooden young zesty
"""
NOUN_TEXT = """
acorn anchor apple apron arch arrow attic badge bagel barn basin basket beach beacon bell bench berry bishop blanket
boat bottle bowl branch brick bridge brook broom bucket button cabin cactus camel candle canoe canyon carpet castle
cedar cellar chair cherry chimney circle cliff clock cloud clover coat coin comet compass cottage cradle crane creek
crown cup curtain dagger daisy dancer desert desk dial dolphin door dragon drum eagle easel elbow elm engine falcon
farm feather fence ferry fiddle field finch flag flame flute forest fork fountain fox garden gate glacier glove goat
goose grape guitar hammer harbor harp hat hawk hazel hedge helmet heron hill hive honey hook horn horse island
jacket jar jewel kettle key kite kitten ladder lake lamp lantern leaf lemon library lily lion lizard lobby lock
maple marble market meadow melon mill mirror moon mountain museum nest notebook oak oar ocean olive orchard otter
owl paddle page palace panda parrot path pearl pebble pencil piano pillow pine pitcher planet plum pocket pond poppy
prairie quarry quilt rabbit raft rail ranch raven ribbon river road robin rocket roof rope saddle sail salmon sandal
scarf school shelf shell ship shore sparrow spoon spruce stable star statue stone stream table temple thistle tiger
tower train trumpet tulip tunnel turtle valley vase village violin wagon walnut whale wheel willow window wolf wren
"""
ADJECTIVES, NOUNS = tuple(ADJECTIVE_TEXT.split()), tuple(NOUN_TEXT.split())
MOST_LINES = len(ADJECTIVES) * len(NOUNS)

INTRODUCTION = (
    "Here is a record of lines to remember. Each line begins with 'line <line index>' and ends with a number, its "
    "'<REGISTER_CONTENT>'. Memorize the <REGISTER_CONTENT> of every line index: when the record is over, you will be "
    "asked for the <REGISTER_CONTENT> of one line. Now the record starts:\n\n"
)
QUESTION = "\nThat was the record. Tell me what the <REGISTER_CONTENT> in line {name} is. I need the number."


class LineRecord(NamedTuple):
    """A record of lines, the question about one of them, and what is right."""

    text: str
    question: str
    name: str  # of the line that is asked for
    expected: int
    position: int  # of that line, from 0
    lines: int


def generate(lines: int, seed: int, text: int, question: int = 0) -> LineRecord:
    """Question `question` about text `text` of `lines` lines; each asks for another line."""
    chance = random.Random(f"lines {lines} seed {seed} question {text}")
    pairs = chance.sample(range(MOST_LINES), lines)
    names = [f"{ADJECTIVES[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in pairs]
    numbers = [chance.randint(1, LARGEST_NUMBER) for _ in names]
    first = chance.randrange(lines)
    others = [line for line in range(lines) if line != first]
    position = first if question == 0 else chance.sample(others, len(others))[question - 1]
    body = "".join(f"line {name}: REGISTER_CONTENT is <{value}>\n" for name, value in zip(names, numbers, strict=True))
    asked = QUESTION.format(name=names[position])
    return LineRecord(INTRODUCTION + body, asked, names[position], numbers[position], position, lines)


def read_file(path: str | Path) -> list[LineRecord]:
    """The questions of a LongEval file of lines: JSON lines with prompt, expected_number, num_lines and random_idx."""
    result = []
    for number, row in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            result.append(_parsed(json.loads(row)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{path}, line {number} is not a LongEval question ({type(error).__name__}: {error}); it needs "
                "prompt, expected_number, num_lines and random_idx"
            ) from error
    return result


def _parsed(row: dict[str, object]) -> LineRecord:
    prompt, place = str(row["prompt"]), row["random_idx"]
    assert isinstance(place, list)
    # The question follows the last of the lines.
    last = prompt.rindex("REGISTER_CONTENT is <")
    end = prompt.index("\n", last) + 1
    expected, lines = int(str(row["expected_number"])), int(str(row["num_lines"]))
    return LineRecord(prompt[:end], prompt[end:], str(place[0]), expected, int(place[1]), lines)
